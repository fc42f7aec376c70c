"""The pictures of who got to the target, and when: bars with their spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from natgrad.lab.compare import Comparison
from natgrad.lab.compare.summary import (
    Text,
    Way,
    number_text,
    seconds_to,
    steps_to,
    three_digits,
    whole,
)
from natgrad.lab.report.canvas import INK, number
from natgrad.lab.report.page.colours import Owner
from natgrad.lab.report.page.comparison_curves import looks, taking_part
from natgrad.lab.report.page.curves import WIDTH, grid
from natgrad.lab.report.page.figure import Picture, Sheet


def pictures(found: Comparison, name: str) -> list[Picture]:
    """Steps and seconds to the target."""
    entries = [one for one in taking_part(found) if one.runs]
    if found.target is None or not entries:
        return []
    looking = looks(found, name)
    goal = f"{found.measure.name} {number_text(found.measure.metric, found.target)}"
    steps = [_Bar(looking[one.key], steps_to(one), whole) for one in entries]
    seconds = [_Bar(looking[one.key], seconds_to(one), three_digits) for one in entries]
    return [
        _picture(f"{name}-to-steps", f"Steps to {goal}", "steps to the target", steps),
        _picture(f"{name}-to-seconds", f"Seconds to {goal}", "seconds to the target", seconds),
    ]


@dataclass(frozen=True)
class _Bar:
    owner: Owner
    way: Way
    text: Text

    @property
    def said(self) -> str:
        return said(self.way, self.text)


def said(way: Way, text: Text) -> str:
    """As the table says it, without the spread."""
    return f"{text(median(way.values))}{way.missed}" if way.values else way.text(text)


def _picture(name: str, title: str, what: str, rows: Sequence[_Bar]) -> Picture:
    def draw(sheet: Sheet) -> None:
        axes: Any = sheet.figure.subplots()
        most = max((v for row in rows for v in row.way.values), default=1.0)
        for i, row in enumerate(rows):
            values = row.way.values
            end = median(values) if values else 0.0
            patch = axes.barh(i, end, 0.62, color=row.owner.colour, alpha=0.8)[0]
            sheet.mark(patch, row.owner.key, f"{row.owner.name}: {row.said}")
            spread = axes.plot(values, [i] * len(values), "|-", color=INK, linewidth=1.0)[0]
            sheet.mark(spread, row.owner.key)
            at = max([end, *values]) + 0.02 * most
            text = axes.text(at, i, row.said, va="center", fontsize=9, color=INK)
            sheet.mark(text, row.owner.key)
        axes.set_yticks(range(len(rows)), [row.owner.name for row in rows])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        longest = max(len(row.said) for row in rows)
        axes.set_xlim(0, (1.05 + 0.022 * longest) * most)
        axes.xaxis.set_major_formatter(lambda value, _: number(value))
        axes.set_xlabel(what)
        grid(axes)
        axes.grid(visible=False, axis="y")

    alt = f"{what}: {'; '.join(f'{row.owner.name} {row.said}' for row in rows)}."
    caption = "Bar: median; strokes: every seed that got there."
    return Picture(name, title, alt, WIDTH, 0.9 + 0.34 * len(rows), draw, caption)
