"""What the Makefile gives to the commands that it runs."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_commands_keep_bytecode(tmp_path):
    """Also where the environment says otherwise: with nothing kept, each of hundreds of processes
    compiles torch before it imports it."""
    shown = tmp_path / "shown.mk"
    shown.write_text("shown:\n\t@env\n", encoding="utf-8")
    said = subprocess.run(
        ["make", "--no-print-directory", "-f", "Makefile", "-f", str(shown), "shown"],
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "KEPT": "as it is"},
        capture_output=True,
        text=True,
        check=True,
    )
    environment = said.stdout.splitlines()
    assert "KEPT=as it is" in environment
    assert not [line for line in environment if line.startswith("PYTHONDONTWRITEBYTECODE")]
