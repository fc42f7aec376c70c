"""Help of every command fits a screen and has an example that can be copied as it stands."""

import pytest
from typer.main import get_command

from natgrad.cli.main import ABOUT, app

WIDTH, HEIGHT = 80, 40


def commands(command, *words):
    """Every command and group with the words that call it."""
    yield words, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, *words, name)


ALL = dict(commands(get_command(app)))


def test_all_are_found():
    assert {("train",), ("plan",), ("bench",), ("curvature",), ("data", "get")} <= set(ALL)


def test_what_is_said_of_all_is_what_each_says():
    """Without importing them."""
    for name, about in ABOUT.items():
        first, *_ = ALL[name,].help.split("\n\n")
        assert " ".join(first.split()) == about


@pytest.mark.parametrize("words", ALL, ids=lambda words: " ".join(("natgrad", *words)))
def test_help_fits_a_screen_and_has_an_example(natgrad, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    said = natgrad(*words, "--help")
    assert said.code == 0
    lines = [line.strip() for line in said.out.splitlines()]
    assert len(lines) <= HEIGHT
    assert max(map(len, said.out.splitlines())) <= WIDTH
    examples = [line for line in lines if line.startswith(("natgrad ", "torchrun "))]
    assert examples
    paragraphs = (ALL[words].help or "").split("\n\n")
    given = [" ".join(part.split()) for part in paragraphs]
    whole = [part for part in given if part.startswith(("natgrad ", "torchrun "))]
    assert set(examples) <= set(whole), "an example is broken into lines"
    assert len(whole) == len(examples)
