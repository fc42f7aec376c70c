"""Tables are written between their marks by the command that made them, and nothing else moves."""

import argparse
import re

import pytest

from benchmarks.page import PAGE, add_output, report
from benchmarks.timing import Row, Table

TABLE = Table("Seconds", [Row("a step", 2.5, "ms")])


def given(*arguments):
    parser = argparse.ArgumentParser()
    add_output(parser)
    return parser.parse_args(arguments)


def test_a_table_takes_the_place_of_the_one_before(tmp_path, capsys):
    page = tmp_path / "PAGE.md"
    other = "<!-- b -->\n<!-- /b -->\nafter\n"
    page.write_text(f"before\n<!-- a -->\nold\n<!-- /a -->\nbetween\n{other}")
    report([TABLE], given("--write", "a", "--page", str(page)))
    said = page.read_text()
    assert said.startswith("before\n<!-- a -->\nprocessor: ")
    assert said.endswith(f"<!-- /a -->\nbetween\n{other}")
    assert "old" not in said
    for name in ("commit", "command", "torch"):
        assert re.search(rf"^{name}: \S", said, re.MULTILINE)
    assert TABLE.render(True).strip() in said
    assert "2.5 ms" in capsys.readouterr().out  # and it is printed as ever
    report([TABLE], given())
    assert page.read_text() == said


def test_a_mark_that_is_not_there(tmp_path):
    page = tmp_path / "PAGE.md"
    page.write_text("<!-- a -->\n")
    with pytest.raises(SystemExit) as error:
        report([TABLE], given("--write", "a", "--page", str(page)))
    assert str(error.value) == (
        f"{page} has no lines <!-- a --> and <!-- /a -->: write them where the text belongs."
    )


def test_every_mark_of_the_page_ends_and_says_its_command():
    page = PAGE.read_text(encoding="utf-8")
    marks = re.findall(r"^<!-- ([a-z0-9-]+) -->$", page, re.MULTILINE)
    assert len(marks) == len(set(marks)) >= 8
    for mark in marks:
        (text,) = re.findall(rf"<!-- {mark} -->\n(.*?)<!-- /{mark} -->", page, re.DOTALL)
        if mark != "comparison":
            assert re.search(r"^command: python -m benchmarks\.\w+", text, re.MULTILINE), mark
