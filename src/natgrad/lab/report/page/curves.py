"""Numbers against steps or seconds, one picture for many curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from math import isfinite
from typing import TYPE_CHECKING, Any

from natgrad.lab.report.canvas import INK, bare, logarithmic, number
from natgrad.lab.report.page.colours import Owner
from natgrad.lab.report.page.figure import Picture, Sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 4.7, 3.3  # inches
_MOST = 600  # points of a curve: more are not seen
TALL = 10.0  # times: values that differ so much are drawn on a logarithmic axis


@dataclass(frozen=True)
class Curve:
    """``faint``: one of several whose middle is drawn as well."""

    owner: Owner
    title: str
    x: Sequence[float]
    y: Sequence[float]
    faint: bool = False


@dataclass(frozen=True)
class Across:
    """What curves are drawn against: ``name`` says what is counted, ``label`` and ``short`` what an
    axis and a single number are called. Numbers are divided by ``unit``."""

    name: str
    label: str
    short: str
    unit: float = 1.0


STEPS = Across("steps", "step", "step")


def seconds(longest: float) -> Across:
    """In a unit that suits the longest of the runs."""
    for limit, unit, name in ((180.0, 1.0, "s"), (10_800.0, 60.0, "min")):
        if longest <= limit:
            return Across("seconds", f"training time ({name})", name, unit)
    return Across("seconds", "training time (h)", "h", 3600.0)


@dataclass(frozen=True)
class Plot:
    """``target`` is drawn as a dashed line. What is ``falling`` may have a logarithmic axis."""

    label: str
    across: Across
    curves: Sequence[Curve]
    target: float | None = None
    falling: bool = True

    def picture(self, name: str, title: str, alt: str, caption: str = "") -> Picture:
        high = HEIGHT + 0.2 * rows([one.name for one in self.owners] if self.named else [])
        return Picture(name, title, alt, WIDTH, high, self.draw, caption)

    @property
    def owners(self) -> list[Owner]:
        return list(dict.fromkeys(curve.owner for curve in self.curves))

    @property
    def named(self) -> bool:
        return len(self.owners) > 1

    def draw(self, sheet: Sheet) -> None:
        axes: Any = sheet.figure.subplots()
        for curve in self.curves:
            self._line(sheet, axes, curve)
        values = [curve.y for curve in self.curves]
        low, high = limits(values, self.target)
        if self.falling:
            high = fallen(values, low, high)
        else:
            low = risen(values, low, high, self.target)
        if self.falling and low > 0 and high > TALL * low:
            axes.set_ylim(low / 1.3, high * 1.2)
            logarithmic(axes.yaxis)
        else:
            axes.set_ylim(*padded(low, high))
            axes.yaxis.set_major_formatter(lambda value, _: number(value))
        axes.xaxis.set_major_formatter(lambda value, _: number(value))
        if self.target is not None:
            line = axes.axhline(self.target, color=INK, linewidth=1.0, linestyle=(0, (5, 4)))
            sheet.mark(line, title=f"target: {number(self.target)}")
        axes.set_xlim(left=0)
        axes.set_xlabel(self.across.label)
        axes.set_ylabel(self.label)
        grid(axes)
        sheet.readable(axes, self.across.short, self.label)
        if self.named:
            legend(sheet, self.owners)

    def _line(self, sheet: Sheet, axes: Axes, curve: Curve) -> None:
        x, y = thinned(curve.x, curve.y)
        (line,) = axes.plot(
            [value / self.across.unit for value in x],
            y,
            color=curve.owner.colour,
            linestyle=curve.owner.dash,
            linewidth=0.9 if curve.faint else 2.0,
            alpha=0.45 if curve.faint else 1.0,
            zorder=2 if curve.faint else 3,
        )
        if len(y) == 1:
            line.set_marker("o")
        sheet.mark(line, curve.owner.key, curve.title, curve=True)


def columns(names: Sequence[str]) -> int:
    """Of a legend, by the length of its names: as many as fit beside each other."""
    for high in range(1, len(names)):
        count = -(-len(names) // high)  # of which the first have one more where that is not even
        starts = [i * len(names) // count for i in range(count + 1)]
        longest = (max(map(len, names[a:b])) for a, b in pairwise(starts))
        if sum(36 + 5.8 * letters for letters in longest) < 72 * WIDTH:
            return count
    return 1


def rows(names: Sequence[str]) -> int:
    return -(-len(names) // columns(names))


def legend(sheet: Sheet, owners: Sequence[Owner]) -> None:
    from matplotlib.lines import Line2D

    drawn = [Line2D([], [], color=one.colour, linestyle=one.dash, linewidth=2.0) for one in owners]
    names = [one.name for one in owners]
    made = sheet.figure.legend(
        drawn,
        names,
        loc="outside lower center",
        ncols=columns(names),
        frameon=False,
        handlelength=1.6,
        columnspacing=1.4,
    )
    for one, handle, text in zip(owners, made.legend_handles, made.get_texts(), strict=True):
        assert handle is not None
        sheet.mark(handle, one.key)
        sheet.mark(text, one.key)


def boxes(sheet: Sheet, named: Sequence[tuple[str, float, str]]) -> None:
    """A legend of areas: their colours, how much of them, and what they stand for."""
    from matplotlib.patches import Patch

    names = [text for _, _, text in named]
    sheet.figure.legend(
        [Patch(color=colour, alpha=alpha, linewidth=0) for colour, alpha, _ in named],
        names,
        loc="outside lower center",
        ncols=columns(names),
        frameon=False,
        handlelength=1.0,
        columnspacing=1.4,
    )


def grid(axes: Axes) -> None:
    axes.grid(color=INK, alpha=0.12, linewidth=0.6)
    axes.set_axisbelow(True)
    bare(axes)


def limits(curves: Sequence[Sequence[float]], target: float | None) -> tuple[float, float]:
    """The smallest and the largest number, and more than none between them."""
    known = [value for value in chain.from_iterable(curves) if isfinite(value)]
    known += [] if target is None else [target]
    if not known:
        return 0.0, 1.0
    low, high = min(known), max(known)
    return (low, high) if low < high else (low - 0.5, high + 0.5)


def fallen(curves: Sequence[Sequence[float]], low: float, high: float) -> float:
    """The upper end of an axis for what falls: a run that goes astray leaves it."""
    starts = [one[0] for one in curves if len(one) and isfinite(one[0]) and one[0] > low]
    return min(high, 3 * max(starts)) if starts and low > 0 else high


def risen(
    curves: Sequence[Sequence[float]], low: float, high: float, target: float | None
) -> float:
    """The lower end of an axis for what rises: the first steps are the least of it."""
    later = [value for one in curves for value in one[len(one) // 8 :] if isfinite(value)]
    later += [] if target is None else [target]
    return min(later) if later and min(later) < high else low


def padded(low: float, high: float) -> tuple[float, float]:
    room = 0.04 * (high - low)
    return low - room, high + room


def thinned(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most about ``_MOST`` points, the highest and the lowest of each stretch among them."""
    if len(x) <= _MOST:
        return list(x), list(y)
    step = -(-len(x) // (_MOST // 2))
    kept: list[int] = []
    for first in range(0, len(x), step):
        part = range(first, min(first + step, len(x)))
        some = [i for i in part if isfinite(y[i])] or list(part)
        kept += sorted({min(some, key=y.__getitem__), max(some, key=y.__getitem__)})
    kept = sorted({0, *kept, len(x) - 1})
    return [x[i] for i in kept], [y[i] for i in kept]
