"""The wheel and the source distribution hold what they should, and run in an environment of their
own, where nothing of the repository can be seen."""

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


def run(*command, **more):
    """With nothing from outside that would be imported."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    ran = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=240,
        **{"env": clean, **more},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def build(folder, target, out):
    run(
        sys.executable, "-m", "hatchling", "build", "-t", target, "-d", out,
        cwd=folder, env=dict(os.environ),
    )  # fmt: skip
    (made,) = out.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return made


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source distribution, and the wheel that is built from it."""
    pytest.importorskip("hatchling", reason="builds the package; part of the extra dev")
    folder = tmp_path_factory.mktemp("built")
    source = build(ROOT, "sdist", folder)
    with tarfile.open(source) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return source, build(unpacked, "wheel", folder)


def version():
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]


def test_the_wheel_holds_the_library_alone(built):
    names = set(zipfile.ZipFile(built[1]).namelist())
    sources = {p.relative_to(ROOT / "src").as_posix() for p in (ROOT / "src").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    assert "natgrad/py.typed" in names
    info = f"natgrad-{version()}.dist-info"
    assert {name.split("/")[0] for name in names} == {"natgrad", info}
    assert f"{info}/licenses/LICENSE" in names
    metadata = zipfile.ZipFile(built[1]).read(f"{info}/METADATA").decode()
    assert re.findall(r"^Requires-Dist: (\w+)[^;\n]*$", metadata, re.MULTILINE) == [
        "numpy",
        "torch",
    ]


def test_the_source_distribution_can_be_tested(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "Makefile", "constraints.txt", "README.md", "LICENSE"} <= names
    assert {"tests/conftest.py", "docs/index.md", "src/natgrad/py.typed"} <= names
    assert not any(name.startswith((".venv", "demo/")) for name in names)


PROGRAM = """
import natgrad, sys, torch
assert sys.argv[1] in natgrad.__file__, natgrad.__file__
assert natgrad.__version__ == sys.argv[2], natgrad.__version__
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kfac = natgrad.KFAC(model, optimizer).attach()
x = torch.randn(32, 4)
losses = []
for _ in range(20):
    optimizer.zero_grad()
    loss = (model(x) - x[:, :2].sin()).square().sum(1).mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert kfac.steps == 20 and losses[-1] < 0.5 * losses[0], losses
print("trained")
"""


def test_it_runs_in_an_environment_of_its_own(built, tmp_path):
    """With torch and numpy from this one, whose folder comes last."""
    home = tmp_path / "clean"
    run(sys.executable, "-m", "venv", "--without-pip", home)
    python = home / ("Scripts" if os.name == "nt" else "bin") / "python"
    run(
        sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python,
        "install", "--no-index", "--no-deps", built[1],
    )  # fmt: skip
    (site,) = home.rglob("site-packages")
    (site / "zz_torch.pth").write_text(sysconfig.get_paths()["purelib"])
    assert "trained" in run(python, "-I", "-c", PROGRAM, site, version(), cwd=tmp_path)
    command = python.with_name("natgrad")
    assert "Print who does what" in run(command, "--help", cwd=tmp_path)
