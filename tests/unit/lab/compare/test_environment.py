"""What numbers were measured with."""

import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from natgrad.lab.compare import environment

CPU = torch.device("cpu")


def test_what_is_known():
    found = environment.facts(3, CPU)
    assert (found["processes"], found["threads"]) == ("3", str(torch.get_num_threads()))
    assert found["torch"] == torch.__version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert all(isinstance(value, str) and value for value in found.values())


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["/usr/bin/natgrad", "compare", "--out", "a b"], "natgrad compare --out 'a b'"),
        (["/src/natgrad/__main__.py", "compare"], "natgrad compare"),
        ([""], "python"),
        ([], "python"),
    ],
)
def test_the_command(monkeypatch, argv, expected):
    monkeypatch.setattr(sys, "argv", argv)
    assert environment.command() == expected


def test_what_has_changed_stands_beside_what_was():
    before = {"command": "a", "torch": "2", "machine": "x"}
    now = {"command": "b", "torch": "2", "machine": "y"}
    once = environment.joined(before, now)
    assert once == {"command": "a", "torch": "2", "machine": "x; y"}
    assert environment.joined(once, now) == once
    assert environment.joined({}, now) == now


def test_a_package_that_is_not_installed(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(environment, "version", missing)
    assert environment.facts(1, CPU)["pytorch_optimizer"] == "not installed"


def test_the_processor(monkeypatch, tmp_path):
    known = tmp_path / "cpuinfo"
    known.write_text("vendor: x\nmodel name\t: Fast 9000\nmodel name\t: other\n")
    monkeypatch.setattr(environment, "Path", lambda name: known)
    assert environment.machine(CPU).startswith("Fast 9000, ")
    monkeypatch.setattr(environment, "Path", lambda name: Path(tmp_path / "nothing"))
    monkeypatch.setattr(environment.platform, "processor", lambda: "Slow")
    assert environment.machine(CPU).startswith("Slow, ")
