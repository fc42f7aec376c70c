"""A bar for long passes: only where somebody looks, and only if they are long."""

import sys

import pytest

from natgrad.operators import progress
from natgrad.operators.progress import track
from unit.operators.small_problems import known


class Bar:
    """What was done to it."""

    def __init__(self):
        self.calls = []

    def start(self):
        self.calls.append("start")

    def add_task(self, label, total):
        self.calls.append((label, total))
        return 7

    def update(self, task, completed):
        assert task == 7
        self.calls.append(completed)

    def stop(self):
        self.calls.append("stop")


@pytest.fixture
def bar(monkeypatch):
    made = Bar()
    monkeypatch.setattr(progress, "_bar", lambda wanted: made if wanted else None)
    monkeypatch.setattr(progress, "_PATIENCE", 0.0)
    return made


class Unsized:
    def __iter__(self):
        return iter("abc")


def test_counts(bar):
    assert list(track("abc", "letters", True)) == list("abc")
    assert bar.calls == ["start", ("letters", 3), 1, 2, 3, "stop"]


def test_of_unknown_length(bar):
    assert list(track(Unsized(), "letters", True)) == list("abc")
    assert bar.calls == ["start", ("letters", None), 1, 2, 3, "stop"]


def test_stops_with_whoever_reads(bar):
    for letter in track("abc", "letters", True):
        if letter == "b":
            break
    assert bar.calls == ["start", ("letters", 3), 1, "stop"]


@pytest.mark.parametrize(("items", "wanted"), [("a", True), ("abc", False), ("abc", None)])
def test_none(bar, items, wanted):
    """For a single item, or if nobody wants it."""
    assert list(track(items, "letters", wanted)) == list(items)
    assert bar.calls == []


def test_short_passes_print_nothing(monkeypatch, capfd):
    bar = Bar()
    monkeypatch.setattr(progress, "_bar", lambda wanted: bar)
    assert list(track("abc", "letters", True)) == list("abc")
    assert bar.calls == []
    monkeypatch.undo()
    own = known("classes")
    own.problem(progress=True).gradient()
    assert capfd.readouterr() == ("", "")


def test_only_in_a_terminal(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    assert progress._bar(None) is None
    assert progress._bar(False) is None
    assert progress._bar(True) is not None
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert progress._bar(None) is not None
    assert progress._bar(False) is None


def test_without_rich(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert progress._bar(True) is None


def test_of_passes(bar):
    own = known("classes")
    own.problem(progress=True).gradient()
    assert ("gradient", 3) in bar.calls
