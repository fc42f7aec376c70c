"""The picture of the tuning: what every trial ended with, against its learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from natgrad.lab.compare import Comparison
from natgrad.lab.compare.results import ComparedRun, ContenderResult
from natgrad.lab.compare.setup import Measure
from natgrad.lab.report.canvas import logarithmic, number
from natgrad.lab.report.page import medians
from natgrad.lab.report.page.colours import Owner
from natgrad.lab.report.page.comparison_curves import looks, taking_part
from natgrad.lab.report.page.curves import (
    HEIGHT,
    TALL,
    WIDTH,
    fallen,
    grid,
    legend,
    limits,
    padded,
    rows,
)
from natgrad.lab.report.page.figure import Picture, Sheet


def picture(found: Comparison, name: str) -> Picture | None:
    tried = [one for one in taking_part(found) if one.trials]
    if not tried:
        return None
    looking = looks(found, name)
    drawn = _Trials(found.measure, [(looking[one.key], one) for one in tried])
    trials = [trial for one in tried for trial in one.trials]
    chosen = [f"{one.name} {number(one.chosen, 4)}" for one in tried if one.chosen is not None]
    alt = (
        f"final {found.measure.name} against learning rate; chosen: "
        f"{', '.join(chosen) or 'none'}; {sum(map(medians.failed, trials))} of {len(trials)} "
        "trials failed."
    )
    caption = "A ring is the chosen rate; a cross on top, a trial that diverged or failed."
    high = HEIGHT + 0.2 * rows([one.name for one in tried])
    return Picture(
        f"{name}-tuning", "Tuning of the learning rate", alt, WIDTH, high, drawn.draw, caption
    )


class _Trials:
    def __init__(self, measure: Measure, entries: Sequence[tuple[Owner, ContenderResult]]) -> None:
        self.measure, self.entries = measure, entries

    def draw(self, sheet: Sheet) -> None:
        axes: Any = sheet.figure.subplots()
        for owner, one in self.entries:
            self._of(sheet, axes, owner, one)
        self._limits(axes)
        rates = [trial.lr for _, one in self.entries for trial in one.trials]
        axes.set_xlim(min(rates) / 1.5, max(rates) * 1.5)
        logarithmic(axes.xaxis)
        axes.set_xlabel("learning rate")
        axes.set_ylabel(f"final {self.measure.name}")
        grid(axes)
        sheet.readable(axes, "learning rate", f"final {self.measure.name}")
        legend(sheet, [owner for owner, _ in self.entries])

    def _limits(self, axes: Any) -> None:
        """A trial that ends far above where it began is worth no more room than one that failed."""
        trials = [trial for _, one in self.entries for trial in one.trials]
        curves = [trial.curve.values.get(self.measure.key, ()) for trial in trials]
        ends = [trial.final for trial in trials if trial.final is not None]
        low, high = limits([ends], None)
        if not self.measure.higher:
            high = fallen(curves, low, high)
        if not self.measure.higher and low > 0 and high > TALL * low:
            axes.set_ylim(low / 1.8, high * 2.5)
            logarithmic(axes.yaxis)
        else:
            axes.set_ylim(*padded(low, high))
            axes.yaxis.set_major_formatter(lambda value, _: number(value))

    def _of(self, sheet: Sheet, axes: Any, owner: Owner, one: ContenderResult) -> None:
        trials = sorted(one.trials, key=lambda trial: trial.lr)
        done = [t for t in trials if t.final is not None and not medians.failed(t)]
        line = _plot(axes, done, owner, linestyle=owner.dash, linewidth=1.5, markersize=4)
        sheet.mark(line, owner.key, one.name, curve=True)
        (crosses,) = axes.plot(
            lost := [t.lr for t in trials if medians.failed(t)],
            [0.97] * len(lost),
            color=owner.colour,
            linestyle="none",
            marker="x",
            markersize=6,
            markeredgewidth=1.8,
            transform=axes.get_xaxis_transform(),  # the second number is a share of the height
        )
        sheet.mark(crosses, owner.key, f"{one.name}: diverged or failed")
        ring = {"markersize": 11, "markerfacecolor": "none", "markeredgewidth": 1.8}
        best = [t for t in done if t.lr == one.chosen]
        sheet.mark(
            _plot(axes, best, owner, linestyle="none", **ring), owner.key, f"{one.name}: chosen"
        )


def _plot(axes: Any, trials: Sequence[ComparedRun], owner: Owner, **style: Any) -> Any:
    rates, ends = [trial.lr for trial in trials], [trial.final for trial in trials]
    return axes.plot(rates, ends, color=owner.colour, marker="o", **style)[0]
