"""Where the time of a step goes: K-FAC by stage, and the rest, which is that of training
without it (Pauloski 2022, fig. 7).

rest = elapsed - Σ stages
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from natgrad.lab.compare.summary import three_digits
from natgrad.lab.report.canvas import COLOURS, FAINT, number
from natgrad.lab.report.page.curves import WIDTH, boxes, grid, rows
from natgrad.lab.report.page.figure import Picture, Sheet
from natgrad.lab.report.page.json_files import finite
from natgrad.lab.report.page.run_folder import Run
from natgrad.tables import seconds_text

REST = "forward, backward, optimizer"
_MEANING = {
    "A": "sums of A",
    "G": "sums of G",
    "norm": "sums of norm layers",
    "fold": "averages",
    "refresh": "decompositions",
    "apply": "preconditioning",
}
_EACH = "apply"  # the stage of every step
_BARS = 40  # along a run


@dataclass(frozen=True)
class Stretch:
    """``seconds`` by stage of all steps after ``first`` up to ``last``."""

    first: int
    last: int
    seconds: Mapping[str, float]

    @property
    def steps(self) -> int:
        return self.last - self.first

    def joined(self, other: Stretch) -> Stretch:
        names = dict.fromkeys([*self.seconds, *other.seconds])
        both = {n: self.seconds.get(n, 0.0) + other.seconds.get(n, 0.0) for n in names}
        return Stretch(self.first, other.last, both)

    def of_a_step(self) -> dict[str, float]:
        return {name: value / self.steps for name, value in self.seconds.items()}


def stretches(run: Run) -> list[Stretch]:
    """Between one line on stages and the next. What a process had spent before its first line is
    known of the first process only: the others went on at a step that the log does not name."""
    found: list[Stretch] = []
    step, elapsed, before, had = 0, 0.0, dict[str, float](), 0.0
    for line in run.of("stages"):
        spent, calls = _numbers(line.values.get("seconds")), _numbers(line.values.get("calls"))
        if not spent or line.seconds is None:
            continue
        steps = line.step - step
        # Every step has one; those of a new process are counted from 0 again.
        if steps > 0 and calls.get(_EACH) == had + steps:
            parts = {name: value - before.get(name, 0.0) for name, value in spent.items()}
            rest = max(0.0, line.seconds - elapsed - sum(parts.values()))
            found.append(Stretch(step, line.step, {REST: rest, **parts}))
        step, elapsed, before, had = line.step, line.seconds, spent, calls.get(_EACH, 0.0)
    return found


def _numbers(given: Any) -> dict[str, float]:
    """By stage; nothing if it is something else."""
    every = given.items() if isinstance(given, Mapping) else ()
    return {str(name): value for name, v in every if (value := finite(v)) is not None}


def whole(found: Sequence[Stretch]) -> Stretch | None:
    """All of them as one, whose ``steps`` are those that were seen."""
    if not found:
        return None
    total = found[0]
    for one in found[1:]:
        joined = total.joined(one)
        total = Stretch(0, total.steps + one.steps, joined.seconds)
    return Stretch(0, total.steps, total.seconds)


def average(bars: Sequence[tuple[str, str, Mapping[str, float]]], name: str) -> Picture:
    """A bar for each key, name and seconds of a step by stage."""
    colours = _colours([parts for _, _, parts in bars])
    said = [f"{label} {seconds_text(sum(parts.values()))}" for _, label, parts in bars]

    def draw(sheet: Sheet) -> None:
        axes: Any = sheet.figure.subplots()
        unit, scale = _unit(max(sum(parts.values()) for _, _, parts in bars))
        for i, (key, label, parts) in enumerate(bars):
            left = 0.0
            for stage, seconds in parts.items():
                patch = axes.barh(
                    i, seconds * scale, 0.62, left=left, color=colours[stage], linewidth=0
                )[0]
                sheet.mark(patch, key, _said(label, stage, seconds, sum(parts.values())))
                left += seconds * scale
            text = axes.annotate(
                three_digits(left),
                (left, i),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
            )
            sheet.mark(text, key)
        axes.set_yticks(range(len(bars)), [label for _, label, _ in bars])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(len(bars) - 0.4, -0.6)
        axes.set_xlim(0, 1.15 * scale * max(sum(parts.values()) for _, _, parts in bars))
        axes.xaxis.set_major_formatter(lambda value, _: number(value))
        axes.set_xlabel(f"{unit} of a step")
        grid(axes)
        axes.grid(visible=False, axis="y")
        _key(sheet, colours)

    alt = f"time of a step by stage: {'; '.join(said)}."
    height = 1.0 + 0.36 * len(bars) + 0.2 * rows(list(map(meaning, colours)))
    return Picture(name, "Where the time of a step goes", alt, WIDTH, height, draw)


def along(found: Sequence[Stretch], name: str) -> Picture:
    """A stacked bar for every stretch of a run."""
    step = -(-len(found) // _BARS)
    merged = []
    for i in range(0, len(found), step):
        some = found[i]
        for one in found[i + 1 : i + step]:
            some = some.joined(one)
        merged.append(some)
    colours = _colours([one.seconds for one in merged])

    def draw(sheet: Sheet) -> None:
        axes: Any = sheet.figure.subplots()
        unit, scale = _unit(max(sum(one.of_a_step().values()) for one in merged))
        floor = [0.0] * len(merged)
        for stage, colour in colours.items():
            heights = [one.of_a_step().get(stage, 0.0) * scale for one in merged]
            axes.bar(
                [one.first for one in merged],
                heights,
                [0.92 * one.steps for one in merged],
                bottom=floor,
                align="edge",
                color=colour,
                linewidth=0,
            )
            floor = [a + b for a, b in zip(floor, heights, strict=True)]
        axes.set_xlim(left=0)
        axes.set_xlabel("step")
        axes.set_ylabel(f"{unit} of a step")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: number(value))
        grid(axes)
        axes.grid(visible=False, axis="x")
        _key(sheet, colours)

    first, last = (sum(merged[i].of_a_step().values()) for i in (0, -1))
    alt = (
        "time of a step by stage against steps: "
        f"{seconds_text(first)} at the beginning, {seconds_text(last)} at the end."
    )
    return Picture(
        name,
        "Time of a step along the run",
        alt,
        WIDTH,
        3.3 + 0.2 * rows(list(map(meaning, colours))),
        draw,
    )


def _colours(rows: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """By stage, the rest first."""
    stages = dict.fromkeys(stage for parts in rows for stage in parts if stage != REST)
    free = {stage: COLOURS[i % 6] for i, stage in enumerate(stages)}
    return {REST: FAINT, **free}


def _key(sheet: Sheet, colours: Mapping[str, str]) -> None:
    boxes(sheet, [(colour, 1.0, meaning(stage)) for stage, colour in colours.items()])


def meaning(stage: str) -> str:
    return _MEANING.get(stage, stage)


def _said(label: str, stage: str, seconds: float, total: float) -> str:
    share = 100 * seconds / max(total, 1e-12)
    return f"{label}: {meaning(stage)} {seconds_text(seconds)}, {share:.0f}%"


def _unit(longest: float) -> tuple[str, float]:
    """Of seconds, and how many of it are one."""
    return ("seconds", 1.0) if longest >= 1 else ("milliseconds", 1e3)
