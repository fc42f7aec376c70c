"""The command itself: help, errors, and what is said where a package is missing."""

import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from natgrad.cli import run

PROJECT = Path(__file__).parents[3] / "pyproject.toml"


def options_of(text):
    return set(re.findall(r"(?<!\S)--[a-z-]+", text))


def test_help_names_the_commands(natgrad):
    said = natgrad("--help")
    assert said.code == 0
    assert {"plan", "bench"} <= set(said.out.split())
    assert "Print who keeps, decomposes and preconditions what" in said.out


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
    assert "'somewhere' is not one of" in said.words


def test_errors_of_natgrad_are_one_sentence(natgrad):
    said = natgrad("plan", "--network", "nothing", "--ranks", "2")
    assert said.code == 2
    assert said.err.startswith("natgrad: There is no network 'nothing': name one of resnet18,")
    assert said.err.count("\n") == 1


def test_errors_of_others_are_not_hidden(monkeypatch):
    monkeypatch.setattr("natgrad.cli.networks.find", lambda name: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(["plan", "--network", "mlp", "--ranks", "2"])


def forget_commands(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("natgrad.cli.")]:
        monkeypatch.delitem(sys.modules, name)


def test_without_typer(monkeypatch):
    forget_commands(monkeypatch)
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as end:
        run(["plan", "--help"])
    assert end.value.code == (
        "The command line of natgrad needs typer, which is not installed: pip install "
        "'natgrad[cli]'."
    )


def test_another_missing_package_is_not_taken_for_typer(monkeypatch):
    forget_commands(monkeypatch)
    monkeypatch.setitem(sys.modules, "natgrad.placement", None)
    with pytest.raises(ModuleNotFoundError, match="natgrad"):
        run(["plan", "--help"])


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
