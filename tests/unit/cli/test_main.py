"""The command itself: help, errors, and what is said where a package is missing."""

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from natgrad import cli
from natgrad.cli import run

PROJECT = Path(__file__).parents[3] / "pyproject.toml"


def options_of(text):
    return set(re.findall(r"(?<!\S)--[a-z-]+", text))


def test_help_names_the_commands(natgrad):
    said = natgrad("--help")
    assert said.code == 0
    assert {"plan", "bench"} <= set(said.out.split())
    assert "Print who does what, and compare the placements" in said.out


@pytest.mark.parametrize(
    ("command", "some"),
    [
        ("plan", {"--network", "--ranks", "--placement", "--fraction", "--memory-limit", "--draw"}),
        ("bench", {"--network", "--ranks", "--placement", "--bucket", "--trace", "--ops"}),
    ],
)
def test_help_names_the_options(natgrad, command, some):
    said = natgrad(command, "--help")
    assert said.code == 0
    assert some <= options_of(said.out)
    assert "resnet50" in said.out
    assert "module:function" in said.out


def test_an_unknown_word(natgrad):
    said = natgrad("plan", "--network", "mlp", "--ranks", "2", "--placement", "somewhere")
    assert said.code == 2
    assert said.err == (
        "natgrad: There is no placement 'somewhere': name one of auto, comm, mem, hybrid, scatter, "
        "local, or a function (blocks, world) that returns a Plan as module:function.\n"
    )


def test_words_of_ones_own(natgrad):
    """What a path names does what its name does."""
    task = ("plan", "--network", "small-mlp", "--ranks", "2", "--short")
    named = natgrad(*task, "--inverse", "cholesky", "--placement", "mem")
    own = natgrad(
        *task, "--inverse", "natgrad.inverses:Cholesky", "--placement", "natgrad.placement:MemOpt"
    )
    assert own.code == 0, own.err
    assert own.out == named.out.replace("cholesky", "natgrad.inverses:Cholesky")


def test_a_structure_and_a_matrix_of_ones_own(natgrad):
    task = ("curvature", "small-mlp", "random", "--samples", "8", "--eigenvalues", "1")
    named = natgrad(*task, "--structure", "diagonal", "--matrix", "ggn")
    own = natgrad(*task, "--structure", "natgrad.structures:Diagonal", "--matrix", "ggn")
    assert own.code == 0, own.err
    trace = [line.split()[3:] for line in named.out.splitlines() if line.strip().startswith("G")]
    assert trace
    assert [x.split()[3:] for x in own.out.splitlines() if x.strip().startswith("G")] == trace
    wrong = natgrad(*task, "--matrix", "unit.cli.nets:no_network")
    assert wrong.code == 2
    assert wrong.err.startswith("natgrad: Matrix 'unit.cli.nets:no_network' could not be built (")


def test_a_network_that_needs_data(natgrad):
    said = natgrad("plan", "--network", "gpt", "--ranks", "2")
    assert said.code == 2
    assert said.err.startswith(
        "natgrad: Network 'gpt' is built for the data of a task, and here are none: name one of "
        "mlp, resnet8, "
    )


def test_errors_of_natgrad_are_one_sentence(natgrad):
    said = natgrad("plan", "--network", "nothing", "--ranks", "2")
    assert said.code == 2
    assert said.err.startswith("natgrad: There is no network 'nothing': name one of mlp, resnet8,")
    assert said.err.count("\n") == 1


def test_errors_of_others_are_not_hidden(monkeypatch):
    monkeypatch.setattr("natgrad.cli.options.network", lambda name: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(["plan", "--network", "mlp", "--ranks", "2"])


@pytest.fixture
def no_command_is_loaded():
    """Modules that are loaded meanwhile go again: they know none of those that come back."""

    def taken() -> dict[str, object]:
        names = [name for name in sys.modules if name.startswith("natgrad.cli.")]
        for name in names:
            vars(cli).pop(name.removeprefix("natgrad.cli."), None)
        return {name: sys.modules.pop(name) for name in names}

    before = taken()
    yield
    taken()
    sys.modules.update(before)
    for name, module in before.items():
        if "." not in (short := name.removeprefix("natgrad.cli.")):
            setattr(cli, short, module)


@pytest.mark.usefixtures("no_command_is_loaded")
def test_without_typer(monkeypatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as end:
        run(["plan", "--help"])
    assert end.value.code == (
        "The command line of natgrad needs typer, which is not installed: pip install "
        "'natgrad[cli]'."
    )


@pytest.mark.usefixtures("no_command_is_loaded")
def test_another_missing_package_is_not_taken_for_typer(monkeypatch):
    monkeypatch.setitem(sys.modules, "natgrad.placement", None)
    with pytest.raises(ModuleNotFoundError, match="natgrad"):
        run(["plan", "--help"])


@pytest.mark.slow
def test_as_a_module():
    command = [sys.executable, "-m", "natgrad", "--help"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0
    assert "plan" in said.stdout
    assert not said.stderr


def test_the_script_is_the_same():
    scripts = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["scripts"]
    module, _, name = scripts["natgrad"].partition(":")
    assert getattr(importlib.import_module(module), name) is run
