"""Mistakes that were made by hand are those of the library and the tests as they are now."""

import ast
from pathlib import Path

import pytest

from mutation.by_hand import SOURCES, TESTS, table
from mutation.mistakes import MISTAKES, Mistake

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


@pytest.mark.parametrize("file", sorted({one.file for one in MISTAKES}))
def test_what_is_replaced_is_in_its_file_once(file):
    text = (SOURCES / file).read_text()
    own = [one for one in MISTAKES if one.file == file]
    assert [text.count(one.right) for one in own] == [1] * len(own)
    for one in own:
        ast.parse(text.replace(one.right, one.wrong))


def test_every_test_is_there():
    assert [one.test for one in MISTAKES if not is_there(one)] == []


def is_there(one: Mistake) -> bool:
    file, *names = one.test.split("::")
    nodes: list[ast.stmt] = ast.parse((TESTS / file).read_text()).body
    for name in names:
        found = [n for n in nodes if getattr(n, "name", None) == name]
        if not found:
            return False
        nodes = getattr(found[0], "body", [])
    return bool(names)


def test_the_page_has_them():
    assert table(list(MISTAKES)) in PAGE.read_text(), "python -m mutation.by_hand prints the table"
