"""What is imported before it is needed, by a name of each kind, in one new process."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys
heavy = ("torch", "torch._dynamo", "torch.distributed.checkpoint", "sympy", "numpy", "typer",
         "rich", "matplotlib", "transformers", "lightning", "accelerate", "natgrad.lab",
         "natgrad.operators")
found = {}
def look(stage):
    found[stage] = [name for name in heavy if name in sys.modules]
import natgrad
look("import natgrad")
from natgrad.cli.main import ABOUT, app
try:
    app(["--help"], prog_name="natgrad")
except SystemExit as end:
    assert not end.code
look("natgrad --help")
import torch
before = {name for name in heavy if name in sys.modules}
natgrad.KFAC, natgrad.NaturalMuon
found["KFAC, beside torch"] = [n for n in heavy if n in sys.modules and n not in before]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_nothing_heavy_comes_before_it_is_needed():
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120
    )
    found = json.loads(ran.stdout.splitlines()[-1])
    assert "Print who does what" in ran.stdout
    assert found["import natgrad"] == []
    assert set(found["natgrad --help"]) <= {"typer", "rich"}
    assert found["KFAC, beside torch"] == []
