"""Who does what, a row a block and a column a rank: who preconditions, decomposes and keeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from natgrad.lab.report.canvas import COLOURS, FAINT, INK, number, short
from natgrad.lab.report.page.curves import WIDTH, boxes, rows
from natgrad.lab.report.page.figure import Picture, Sheet
from natgrad.lab.report.page.run_folder import PlacedBlock, RecordedPlacement
from natgrad.placement.table import ranks_text
from natgrad.tables import Column, Table

_ROW = 0.2  # inches
_TALLEST = 12.0  # of a map without its legend
_WORKS = COLOURS[5]  # light blue
_NARROW = 16  # ranks, above which numbers are small and some left out
_HALF, _LITTLE = 0.5, 0.16  # of a colour
_FACTORS = (COLOURS[4], COLOURS[2], COLOURS[3], COLOURS[1])

Box = tuple[float, float, float, float]  # left, top, width, height


def picture(placement: RecordedPlacement, name: str) -> Picture | None:
    if not any(block.factors for block in placement.blocks):
        return None
    drawn = _Map(placement)
    alone = placement.ranks == 1
    alt = f"placement {placement.strategy}: {_said(placement)}"
    height = drawn.height + 1.1 + 0.2 * rows([text for _, _, text in drawn.named()])
    title = (
        f"Placement: {placement.strategy}, {'one rank' if alone else f'{placement.ranks} ranks'}"
    )
    caption = f"{_said(placement)} Bars: sizes of the factors."
    return Picture(name, title, alt, WIDTH, height, drawn.draw, caption)


def _said(placement: RecordedPlacement) -> str:
    if placement.ranks == 1:
        return f"One rank does all of the work for {len(placement.blocks)} blocks."
    working = [len(block.workers) for block in placement.blocks]
    busy = [0] * placement.ranks
    for block in placement.blocks:
        for factor in block.factors:
            for rank in factor.decomposers:
                busy[rank] += 1
    some = (
        f"{min(working)}" if min(working) == max(working) else f"{min(working)} to {max(working)}"
    )
    return (
        f"{len(placement.blocks)} blocks on {placement.ranks} ranks; {some} ranks precondition a "
        f"block, and a rank decomposes {min(busy)} to {max(busy)} factors."
    )


class _Map:
    def __init__(self, placement: RecordedPlacement) -> None:
        self.placement, self.blocks, self.ranks = placement, placement.blocks, placement.ranks
        self.height = min(_TALLEST, _ROW * max(4, len(self.blocks)))
        self.factors = list(dict.fromkeys(f.name for b in self.blocks for f in b.factors))
        self.colours = {f: _FACTORS[i % len(_FACTORS)] for i, f in enumerate(self.factors)}
        self.decomposed = list(
            dict.fromkeys(f.name for b in self.blocks for f in b.factors if f.decomposers)
        )

    def named(self) -> list[tuple[str, float, str]]:
        """Colours, how much of them, and their meaning."""
        found = [(_WORKS, _HALF, "preconditions")]
        found += [(self.colours[name], 1.0, f"decomposes {name}") for name in self.decomposed]
        if self.kept_only():
            found.append((INK, 1.0, "keeps only"))
        return found if self.ranks == 1 else [*found, (FAINT, _LITTLE, "gets the result")]

    def kept_only(self) -> list[tuple[int, int]]:
        """Ranks and blocks of which they keep a factor that others decompose."""
        found = []
        for row, block in enumerate(self.blocks):
            keepers = {rank for factor in block.factors for rank in factor.keepers}
            busy = {rank for factor in block.factors for rank in factor.decomposers}
            found += [(rank, row) for rank in sorted(keepers - busy)]
        return found

    def draw(self, sheet: Sheet) -> None:
        share = 1.0 if self.ranks > 8 else 0.35 + 0.08 * self.ranks
        cells, sizes = sheet.figure.subplots(1, 2, sharey=True, width_ratios=(3 * share, 1.2))
        self._cells(cells)
        self._sizes(sizes)
        boxes(sheet, self.named())

    def _cells(self, axes: Any) -> None:
        every = [(-0.5, row - 0.5, float(self.ranks), 1.0) for row in range(len(self.blocks))]
        _fill(axes, every, FAINT, _LITTLE)
        working = [
            box for row, b in enumerate(self.blocks) for box in _boxes(row, b.workers, 0.0, 1.0)
        ]
        _fill(axes, working, _WORKS, _HALF)
        for name, colour in self.colours.items():
            _fill(axes, self._strips(name), colour, 1.0)
        if kept := self.kept_only():
            dots = min(3.0, 90.0 / self.ranks)
            axes.plot(*zip(*kept, strict=True), ".", color=INK, markersize=dots)
        axes.set_xlim(-0.5, self.ranks - 0.5)
        axes.set_ylim(len(self.blocks) - 0.5, -0.5)  # the first block on top
        axes.set_xticks(
            range(0, self.ranks, max(1, 8 * -(-self.ranks // 128) * (self.ranks > _NARROW)))
        )
        some = max(1, -(-len(self.blocks) // int(self.height / 0.13)))
        ticks = range(0, len(self.blocks), some)
        axes.set_yticks(ticks, [short(self.blocks[i].name) for i in ticks])
        small = self.height / len(self.blocks) < 0.17 * some
        axes.tick_params(length=0, labelsize=8 if small or self.ranks > _NARROW else 9)
        axes.set_xlabel("rank")
        for side in axes.spines.values():
            side.set_visible(False)

    def _strips(self, name: str) -> list[Box]:
        """Of the ranks that decompose it: a part of the cell for each factor of the block, beside
        each other, or one above the other where cells are narrow."""
        found: list[Box] = []
        for row, block in enumerate(self.blocks):
            shown = [factor for factor in block.factors if factor.decomposers]
            for i, factor in enumerate(shown):
                if factor.name == name:
                    for rank in factor.decomposers:
                        part = 1 / len(shown)
                        if self.ranks > _NARROW:
                            found.append((rank - 0.5, row - 0.5 + i * part, 1.0, part))
                        else:
                            found.append((rank - 0.5 + i * part, row - 0.3, part, 0.6))
        return found

    def _sizes(self, axes: Any) -> None:
        step = 0.8 / len(self.factors)
        for i, name in enumerate(self.factors):
            rows = [
                (row, factor.size)
                for row, block in enumerate(self.blocks)
                for factor in block.factors
                if factor.name == name
            ]
            at = [row - 0.4 + (i + 0.5) * step for row, _ in rows]
            wide = [size for _, size in rows]
            axes.barh(at, wide, step, color=self.colours[name], linewidth=0)
        axes.tick_params(axis="y", length=0, labelleft=False)
        axes.xaxis.set_major_formatter(lambda value, _: number(value))
        axes.locator_params(axis="x", nbins=3)
        axes.set_xlabel("size")
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)


def _boxes(row: int, ranks: Iterable[int], top: float, height: float) -> list[Box]:
    """One for each stretch of ranks, so that a large map is not a large file."""
    ordered = sorted(ranks)
    ends = [i for i, (a, b) in enumerate(pairwise(ordered)) if b != a + 1]
    found, first = [], 0
    for end in [*ends, len(ordered) - 1]:
        if ordered:
            left, right = ordered[first], ordered[end]
            found.append((left - 0.5, row - 0.5 + top, right - left + 1.0, height))
        first = end + 1
    return found


def _fill(axes: Any, boxes: Sequence[Box], colour: str, alpha: float) -> None:
    """All of them as one path, with a little room between rows."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    if not boxes:
        return
    gap = 0.06
    points: list[tuple[float, float]] = []
    codes: list[Any] = []
    for x, y, width, height in boxes:
        low, high = y + gap * height, y + (1 - gap) * height
        points += [(x, low), (x + width, low), (x + width, high), (x, high), (x, low)]
        codes += [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
    axes.add_patch(PathPatch(Path(points, codes), color=colour, alpha=alpha, linewidth=0))


def table(placement: RecordedPlacement) -> Table:
    """The same in words."""
    lines = [
        _row(block, factor_index, placement.ranks)
        for block in placement.blocks
        for factor_index in range(len(block.factors))
    ]
    names = ("block", "factor", "size", "kept by", "decomposed by", "preconditioned by")
    columns = tuple(Column(name, "right" if name == "size" else "left") for name in names)
    return Table(f"Placement {placement.strategy}", columns, tuple(lines), "ranks count from 0")


def _row(block: PlacedBlock, index: int, ranks: int) -> tuple[str, ...]:
    factor = block.factors[index]
    who = (ranks_text(some, ranks) for some in (factor.keepers, factor.decomposers, block.workers))
    return (block.name, factor.name, f"{factor.size:,}", *who)
