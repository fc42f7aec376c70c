"""Where figures go: printed, as JSON, and into RESULTS.md between two marks.

    <!-- step-cost-resnet32 -->
    …                                what `--write step-cost-resnet32` puts there, with machine,
    <!-- /step-cost-resnet32 -->     commit and command; the rest of the page stays

Nobody copies a table by hand, so that none stands below another command than its own.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from benchmarks.timing import machine
from natgrad.errors import SettingError
from natgrad.lab.marks import write_between

PAGE = Path(__file__).parent / "RESULTS.md"


class Rendered(Protocol):
    """A table of a benchmark."""

    title: str
    rows: Any

    def render(self, markdown: bool = False) -> str: ...


def write(page: Path, mark: str, text: str) -> None:
    """Between the two lines of a mark; a page without it ends the program with a sentence.

    Arguments:
        page: a file of Markdown.
        mark: its name.
        text: in Markdown.
    """
    try:
        write_between(page, mark, text)
    except SettingError as error:
        raise SystemExit(str(error)) from None


def facts_text(facts: Mapping[str, str], markdown: bool = True) -> str:
    """Machine, commit and command, a line each."""
    return ("  \n" if markdown else "\n").join(f"{name}: {value}" for name, value in facts.items())


def add_output(parser: argparse.ArgumentParser) -> None:
    """The options that `report` reads.

    Arguments:
        parser: of a benchmark.
    """
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    parser.add_argument("--write", metavar="MARK", help="also write the tables into RESULTS.md")
    parser.add_argument("--page", type=Path, default=PAGE, help=argparse.SUPPRESS)


def report(tables: Sequence[Rendered], given: argparse.Namespace) -> None:
    """Print the tables under the machine that they were measured on, and write them where they are
    asked for.

    Arguments:
        tables: what was measured.
        given: the options of `add_output`.
    """
    facts = machine()
    print(facts_text(facts, given.markdown) + "\n")
    for table in tables:
        print(table.render(given.markdown))
    if given.json:
        data = {
            "machine": facts,
            "tables": [
                {"title": t.title, "rows": [asdict(r) | {"verdict": r.verdict} for r in t.rows]}
                for t in tables
            ],
        }
        Path(given.json).write_text(json.dumps(data, indent=2) + "\n")
    if given.write:
        found = "\n".join(table.render(True) for table in tables)
        write(given.page, given.write, f"{facts_text(facts)}\n\n{found}")
