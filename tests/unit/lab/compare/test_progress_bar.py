"""What is said while a comparison runs."""

import io
import sys

import pytest

from natgrad.lab.compare import progress_bar
from natgrad.lab.compare.progress_bar import (
    ComparisonBar,
    ComparisonLines,
    NoComparisonProgress,
    RunWithinComparison,
    TimeLeft,
    shown,
)


def test_lines():
    said = []
    lines = ComparisonLines(said.append)
    lines.note("Something.")
    lines.run(3, 64, "SGD: trial 1 of 5")
    lines.part(0.5)
    lines.end()
    assert said == ["Something.", "[ 3/64] SGD: trial 1 of 5"]


def test_a_run_tells_its_part():
    parts = []

    class Parts(NoComparisonProgress):
        def part(self, done):
            parts.append(done)

    within = RunWithinComparison(Parts())
    within.start(2, 8)
    within.step(4, {})
    within.tested(4, {})
    within.end()
    assert parts == [0.25, 0.5]


def test_the_time_that_is_left():
    """Each contender by its own runs, others by what is usual."""
    estimate = TimeLeft()
    assert estimate.left([("sgd", 1.0)]) == ""
    estimate.add("sgd", 1.0)
    estimate.add("sgd", 3.0)
    estimate.add("kfac", 10.0)
    runs = [("sgd", 1.0), ("kfac", 1.0), ("kfac", 1.0)]
    assert estimate.left(runs) == ", about 22.0 s left"
    assert estimate.left([("adamw", 1.0)]) == ", about 6.00 s left"
    assert estimate.left([("sgd", 0.25), ("kfac", 1.0)]) == ", about 10.5 s left"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_in_a_terminal(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    bar = shown(print)
    assert isinstance(bar, ComparisonBar)
    bar.note("Rates fall [linearly].")
    bar.run(2, 8, "My [bold] SGD: trial 1 of 5")
    bar.part(0.5)
    assert bar._progress.tasks[0].completed == 1.5
    assert bar._progress.tasks[0].total == 8
    bar._progress.refresh()
    bar.end()
    assert "Rates fall [linearly]." in terminal.getvalue()
    assert "[2/8] My [bold] SGD: trial 1 of 5" in terminal.getvalue()


def test_lines_where_there_is_no_terminal_or_no_rich(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert isinstance(shown(print), ComparisonLines)

    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(progress_bar, "import_module", missing)
    assert isinstance(shown(print), ComparisonLines)
