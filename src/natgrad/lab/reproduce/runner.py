"""Measures an item seed by seed, and goes on where it was interrupted: every seed that is done is
in the item's file."""

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from natgrad.errors import SettingError
from natgrad.lab.compare.environment import facts
from natgrad.lab.marks import write_between
from natgrad.lab.reproduce.item import Item, Result, Tell
from natgrad.lab.train.state import write_text
from natgrad.tables import Table

FORMAT = 1


@dataclass(frozen=True)
class Measured:
    """An item with what was found of it.

    Arguments:
        item: what was measured.
        results: one for each seed.
        facts: machine, versions and command.
        smoke: whether it was measured in seconds, so that the numbers mean nothing.
    """

    item: Item
    results: Sequence[Result]
    facts: dict[str, str]
    smoke: bool

    def table(self) -> Table:
        return self.item.table(self.results)

    def findings(self) -> list[str]:
        return [finding.line(self.results) for finding in self.item.findings()]

    def markdown(self, picture: str = "") -> str:
        """For a page.

        Arguments:
            picture: where the figure is, from there; none if it is empty.
        """
        item, found = self.item, self.table()
        cells = [" | ".join(column.name for column in found.columns)]
        cells.append(" | ".join("---:" if c.align == "right" else "---" for c in found.columns))
        cells += [" | ".join(row) for row in found.rows]
        where = ", ".join(f"{name} {value}" for name, value in self.facts.items())
        parts = [
            f"### {item.title}",
            f"{item.papers}. Printed: {item.printed}",
            "\n".join(f"| {line} |" for line in cells),
            found.footer,
            f"![{item.title}]({picture})" if picture else "",
            "\n".join(f"- {line}" for line in self.findings()),
            item.remark,
            f"`natgrad reproduce {item.name}` ({where})",
            f"With the paper's own settings: `{item.cluster}`" if item.cluster else "",
        ]
        return "\n\n".join(filter(None, parts))


def reproduce(item: Item, folder: Path, seeds: int, tell: Tell, *, smoke: bool = False) -> Measured:
    """Measure what is missing of an item.

    Arguments:
        item: what is measured.
        folder: where ``NAME.json`` and the figure ``NAME.svg`` are kept.
        seeds: how many, at least 1; an item without chance needs one.
        tell: is told what is being done.
        smoke: whether a few seconds must do.
    """
    if seeds < 1:
        raise SettingError(f"seeds is {seeds} but must be at least 1: pass such a number.")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{item.name}{'-smoke' if smoke else ''}.json"
    kept = _read(path)
    wanted = seeds if item.chance else 1
    for seed in range(len(kept["results"]), wanted):
        tell(f"{item.name}, seed {seed + 1} of {wanted}")
        kept["results"].append(item.measure(seed, smoke, tell))
        kept["facts"] = _facts()
        write_text(path, json.dumps({"format": FORMAT, **kept}, indent=1) + "\n")
    found = Measured(item, kept["results"][:wanted], kept["facts"], smoke)
    try:
        item.picture(found.results, path.with_suffix(".svg"))
    except ImportError:
        tell("There is no figure, as matplotlib is not installed: pip install 'natgrad[report]'.")
    return found


def write_page(page: Path, found: Measured, folder: Path) -> None:
    """Write an item into the page, between its marks.

    Arguments:
        page: of Markdown, which has the marks ``NAME``.
        found: the item as it was measured.
        folder: in which its figure is.
    """
    drawn = folder / f"{found.item.name}.svg"
    shown = ""
    if drawn.exists():
        shown = os.path.relpath(drawn, page.parent)
    write_between(page, found.item.name, found.markdown(shown))


def _facts() -> dict[str, str]:
    found = facts(1, torch.device("cpu"))
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        commit = ""
    names = ("machine", "threads", "torch", "python", "natgrad")
    return {**{name: found[name] for name in names}, "commit": commit or "none"}


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"results": [], "facts": {}}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {"results": list(found["results"]), "facts": dict(found["facts"])}
    except (ValueError, KeyError, TypeError) as error:
        raise SettingError(
            f"{path} is no file of results ({type(error).__name__}): move it away to measure anew."
        ) from error
