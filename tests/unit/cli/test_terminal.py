"""Progress is seen on a terminal, and nowhere else."""

import io
import sys

import pytest

from natgrad.cli import terminal


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def in_terminal(monkeypatch):
    """Called by the test itself, as pytest puts its own standard error in place before that."""

    def switch():
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(sys, "stderr", Terminal())
        return sys.stderr

    return switch


def test_a_bar_counts_on_a_terminal_and_goes_away(in_terminal):
    said = in_terminal()
    assert list(terminal.track([1, 2, 3], "Counting")) == [1, 2, 3]
    text = said.getvalue()
    assert "Counting" in text
    assert "100%" in text
    assert text.endswith("\x1b[2K")  # the line is erased


def test_a_status_on_a_terminal_goes_away(in_terminal):
    said = in_terminal()
    with terminal.status("Waiting"):
        pass
    assert "Waiting" in said.getvalue()
    assert said.getvalue().endswith("\x1b[2K")


@pytest.mark.parametrize("colours", [False, True])
def test_nothing_is_said_elsewhere(capsys, monkeypatch, colours):
    if colours:  # which are no reason to draw into a file
        monkeypatch.setenv("FORCE_COLOR", "1")
    assert list(terminal.track([1, 2, 3], "Counting")) == [1, 2, 3]
    with terminal.status("Waiting"):
        pass
    assert capsys.readouterr() == ("", "")


def test_a_comparison_says_how_far_it_is(natgrad, in_terminal):
    seen = in_terminal()
    said = natgrad("plan", "--network", "unit.cli.nets:Shared", "--ranks", "2", "--short")
    assert said.code == 0
    assert "Comparing placements" in seen.getvalue()
    assert "Comparing" not in said.out


def test_a_measurement_says_what_it_does(natgrad, in_terminal, monkeypatch):
    def run(*args, **options):
        raise InterruptedError

    monkeypatch.setattr("natgrad.comm.launch.run", run)
    seen = in_terminal()
    with pytest.raises(InterruptedError):
        natgrad("bench", "--network", "mlp", "--ranks", "2")
    assert "Training mlp on 2 ranks" in seen.getvalue()
