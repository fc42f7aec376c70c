"""A plan as a picture: one row per rank, one column per block, and beside it what a rank keeps."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from natgrad.placement.plan import Plan

# Told apart by readers who do not see red and green apart (Okabe and Ito 2008).
_FACTORS = ("#e69f00", "#009e73", "#cc79a7", "#d55e00", "#f0e442")
_RECEIVES, _HOLDS, _PRECONDITIONS = "#f4f4f4", "#d9d9d9", "#bcd9f0"
_LINES, _DOT = "#ffffff", "#222222"
_MEMORY = (
    ("factors", "#7a5c99"),
    ("inverses", "#8fb8de"),
    ("prepared", "#c9d7e6"),
    ("stacks", "#d9c7a5"),
    ("passing", "#e8e8e8"),
)
_LONGEST = 28  # characters of a block's name; its end says more than its beginning
_MOST_RANKS = 256  # rows of a picture that can still be looked at
_MOST = 80  # names and numbers along an axis, above which some are left out

Box = tuple[float, float, float, float]  # left, top, width, height


def draw(plan: Plan, path: str | PathLike[str] | None) -> Figure:
    """A ``matplotlib`` figure of a plan.

    Arguments:
        plan: what is drawn: a row for each rank, a column for each block.
        path: file to write, whose ending says the format; ``None`` writes none.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ModuleNotFoundError(
            "Plan.draw needs matplotlib, which is not installed: pip install 'natgrad[report]', or "
            "print the plan as a table."
        ) from None
    size = min(plan.world_size, _MOST_RANKS)
    width = 4.5 + 0.21 * max(16, len(plan.blocks))
    figure = Figure(figsize=(width, 2.8 + 0.21 * max(4, size)), layout="constrained")
    cells, memory = figure.subplots(1, 2, sharey=True, width_ratios=(width - 2.6, 2.6))
    _cells(cells, plan)
    _memory(memory, plan)
    ranks = f"{size} rank{'s' if size > 1 else ''}"
    if size < plan.world_size:
        ranks = f"{plan.world_size:,} ranks, of which the first {size} are shown"
    figure.suptitle(f"{plan.strategy}: {len(plan.blocks)} blocks on {ranks}", fontsize=11)
    columns = max(1, int((width - 2.8) / 1.6))  # inches of an entry of the legend
    for axes, place, count in ((cells, "lower left", columns), (memory, "lower center", 2)):
        anchor = (0.0 if axes is cells else 0.5, 1.0)
        axes.legend(
            loc=place,
            bbox_to_anchor=anchor,
            ncols=count,
            frameon=False,
            fontsize=8,
            handlelength=1.2,
            columnspacing=1.2,
            borderaxespad=0.2,
        )
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def _cells(axes: Axes, plan: Plan) -> None:
    others, held, working = [], [], []
    marks: dict[str, list[Box]] = {}
    dots: list[tuple[float, float]] = []
    for column, block in enumerate(plan.blocks):
        workers = plan.workers[block.name]
        working += _boxes(column, 0, 1, workers)
        shown = [name for name, _ in block.factors]
        having = {r for name in shown for r in plan.holders.get((block.name, name), ())}
        held += _boxes(column, 0, 1, having.difference(workers))
        others += _boxes(
            column, 0, 1, set(plan.world.ranks[:_MOST_RANKS]).difference(workers, having)
        )
        for i, name in enumerate(block.decomposed):
            ranks = plan.decomposers[block.name, name]
            marks.setdefault(name, []).extend(_boxes(column, i, len(block.decomposed), ranks))
        keepers = {r for name in shown for r in plan.keepers[block.name, name]}
        busy = {r for name in block.decomposed for r in plan.decomposers[block.name, name]}
        dots += [(column, rank) for rank in sorted(keepers - busy) if rank < _MOST_RANKS]
    _fill(axes, others, _RECEIVES, "gets the result")
    _fill(axes, held, _HOLDS, "holds inverses too")
    _fill(axes, working, _PRECONDITIONS, "preconditions")
    for i, (name, boxes) in enumerate(marks.items()):
        inner = [(x, y + 0.18, w, h - 0.36) for x, y, w, h in boxes]
        _fill(axes, inner, _FACTORS[i % len(_FACTORS)], f"keeps, decomposes {name}")
    if dots:
        axes.plot(*zip(*dots, strict=True), ".", color=_DOT, markersize=3, label="keeps only")
    names = [_short(block.name) for block in plan.blocks]
    step = -(-len(names) // _MOST) or 1
    axes.set_xticks(range(0, len(names), step), names[::step], rotation=90, fontsize=7)
    size = min(plan.world_size, _MOST_RANKS)
    axes.set_yticks(range(0, size, -(-size // _MOST)))
    axes.tick_params(axis="y", labelsize=8)
    axes.tick_params(length=0)
    axes.set_xlim(-0.5, max(1, len(names)) - 0.5)
    axes.set_ylim(size - 0.5, -0.5)  # rank 0 on top
    axes.set_xlabel("block, in the order of the model")
    axes.set_ylabel("rank")


def _memory(axes: Axes, plan: Plan) -> None:
    ranks = plan.world.ranks[:_MOST_RANKS]
    most = max(plan.memory(rank).total for rank in ranks)
    power = min(3, max(0, most.bit_length() - 1) // 10)
    left = [0.0] * len(ranks)
    for purpose, colour in _MEMORY:
        sizes = [getattr(plan.memory(rank), purpose) / 1024**power for rank in ranks]
        axes.barh(ranks, sizes, 0.7, left=left, color=colour, label=purpose)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes.set_xlabel(f"memory ({('B', 'KiB', 'MiB', 'GiB')[power]})")
    axes.tick_params(axis="y", length=0, labelleft=False)
    axes.tick_params(axis="x", labelsize=8)
    axes.margins(x=0.02)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _boxes(column: int, part: int, parts: int, ranks: Iterable[int]) -> list[Box]:
    """One of equal vertical strips of a cell, for each rank."""
    left, width = column - 0.5 + part / parts, 1 / parts
    return [(left, rank - 0.5, width, 1.0) for rank in ranks if rank < _MOST_RANKS]


def _fill(axes: Axes, boxes: list[Box], colour: str, label: str) -> None:
    from matplotlib.collections import PolyCollection

    if boxes:
        corners = [[(x, y), (x + w, y), (x + w, y + h), (x, y + h)] for x, y, w, h in boxes]
        filled = PolyCollection(
            corners, facecolors=colour, edgecolors=_LINES, linewidths=0.6, label=label
        )
        axes.add_collection(filled)


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else "…" + name[1 - _LONGEST :]
