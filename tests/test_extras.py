"""What is not installed is named in one sentence, with the extra of natgrad that brings it."""

import ast
import importlib
import re
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import natgrad
from natgrad import cli
from natgrad.comm import MPI, Horovod
from natgrad.integrations import deepspeed
from natgrad.lab import data
from natgrad.lab.compare import CONTENDERS
from natgrad.lab.data import image_files
from natgrad.lab.models import vision, weights
from natgrad.lab.models.by_name import TaskShapes
from natgrad.lab.report import canvas
from natgrad.lab.schemes import third_party
from natgrad.lab.train import networks, preset

ROOT = Path(__file__).parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
    "optional-dependencies"
]


@dataclass(frozen=True)
class Case:
    """Without ``module``, ``call`` says something about it; ``extra`` has its ``package``."""

    module: str
    package: str
    extra: str | None  # None: that of nobody
    call: Callable[[], object]


def command():
    cli.run(["plan", "--help"])


def drawn_plan():
    natgrad.KFAC(nn.Linear(2, 2), kl_clip=None).plan.draw()


def small():
    return natgrad.hessian(nn.Linear(2, 1), nn.MSELoss(), (torch.ones(3, 2), torch.ones(3, 1)))


def compared():
    raise natgrad.errors.SettingError(CONTENDERS["soap"].missing())


def fresh(name):
    """Import one of the integrations as if it had not been."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, f"natgrad.integrations.{name}", raising=False)
        importlib.import_module(f"natgrad.integrations.{name}")


CASES = {
    "typer": Case("typer", "typer", "cli", command),
    "rich": Case("rich", "rich", "cli", command),
    "a picture": Case("matplotlib", "matplotlib", "report", canvas.available),
    "a plan": Case("matplotlib", "matplotlib", "report", drawn_plan),
    "a spectrum": Case("matplotlib", "matplotlib", "report", lambda: small().spectrum(2, 2).draw()),
    "images": Case("PIL", "pillow", "data", lambda: image_files.opened(Path("a.png"))),
    "digits": Case("sklearn", "scikit-learn", "demo", data.digits),
    "bert": Case(
        "transformers",
        "transformers",
        "train",
        lambda: networks.build(preset("bert-phase2"), TaskShapes(vocabulary=10)),
    ),
    "mask-rcnn": Case("torchvision", "torchvision", "vision", vision.torchvision),
    "soap": Case(
        "pytorch_optimizer",
        "pytorch_optimizer",
        "optimizers",
        lambda: third_party.soap([], 0.1, 0.9),
    ),
    "soap, compared": Case("pytorch_optimizer", "pytorch_optimizer", "optimizers", compared),
    "mpi": Case("mpi4py", "mpi4py", "mpi", MPI),
    "horovod": Case("horovod", "horovod", None, Horovod),  # from source, with flags of its own
    "deepspeed": Case("deepspeed", "deepspeed", "deepspeed", deepspeed._zero),
    "a callback of transformers": Case(
        "transformers", "transformers", "frameworks", lambda: fresh("transformers")
    ),
    "a callback of Lightning": Case(
        "lightning", "lightning", "frameworks", lambda: fresh("lightning")
    ),
    "scipy": Case("scipy", "scipy", None, lambda: small().to_scipy()),
    "safetensors": Case(
        "safetensors", "safetensors", None, lambda: weights.read(Path("a.safetensors"), "DATA")
    ),
}
# Without these something is left out, and nothing has to be said.
QUIET = {"tensorboard"}


def hide(monkeypatch, module):
    """As if it were not installed, also for commands that have been imported with it."""
    inside = [name for name in sys.modules if name.startswith(f"{module}.")]
    for name in (module, *inside):
        monkeypatch.setitem(sys.modules, name, None)
    for name in [name for name in sys.modules if name.startswith("natgrad.cli.")]:
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delattr(cli, name.removeprefix("natgrad.cli."), raising=False)


@pytest.mark.parametrize("name", CASES)
def test_it_is_named_in_one_sentence(monkeypatch, name):
    case = CASES[name]
    hide(monkeypatch, case.module)
    with pytest.raises((natgrad.NatgradError, ModuleNotFoundError, SystemExit)) as caught:
        case.call()
    said = str(caught.value)
    assert "\n" not in said
    assert said.endswith(".")
    (advice,) = re.findall(r"pip install ('natgrad\[\w+\]'|\w+)", said)
    assert advice == (case.package if case.extra is None else f"'natgrad[{case.extra}]'")
    assert re.search(rf"{case.package}|{case.module}", said, re.IGNORECASE)


@pytest.mark.parametrize("name", CASES)
def test_the_extra_brings_it(name):
    case = CASES[name]
    if case.extra is not None:
        assert case.package in packages(case.extra)


def packages(extra):
    """Names of all that it brings, also by other extras of natgrad."""
    found = set()
    for requirement in EXTRAS[extra]:
        name, inner = re.match(r"([\w-]+)(?:\[([\w,]+)\])?", requirement).groups()
        if name != "natgrad":
            found.add(name)
        for other in (inner or "").split(",") if name == "natgrad" else ():
            found |= packages(other)
    return found


def imported(tree):
    """Names of modules, as they are written."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith("import_module")
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.args[0].value


def test_nothing_optional_is_forgotten():
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for name in imported(ast.parse(path.read_text("utf-8"))):
            found.add("tensorboard" if name.endswith("tensorboard") else name.split(".")[0])
    optional = found - set(sys.stdlib_module_names) - {"natgrad", "torch", "numpy"}
    assert optional == {case.module for case in CASES.values()} | QUIET
