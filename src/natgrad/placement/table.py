"""A plan as two tables: by factor who does what, and by rank what that costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from natgrad.specs import FactorSpec, Ranks, as_ranks
from natgrad.tables import Column, Table, bytes_text

if TYPE_CHECKING:
    from natgrad.placement.plan import Plan


_MOST = 6  # ranks that are listed one by one


def by_factor(plan: Plan) -> Table:
    """Which ranks keep, decompose, hold and apply every factor.

    Arguments:
        plan: what is printed.
    """
    size = plan.world_size
    rows = tuple(
        (
            block.name,
            block.kind,
            name,
            _sizes(spec),
            ranks_text(plan.keepers[block.name, name], size),
            ranks_text(plan.decomposers.get((block.name, name), ()), size),
            ranks_text(plan.holders.get((block.name, name), ()), size),
            ranks_text(plan.workers[block.name], size),
        )
        for block in plan.blocks
        for name, spec in block.factors
    )
    columns = (
        Column("block"),
        Column("layer"),
        Column("factor"),
        Column("size", "right"),
        *map(Column, ("kept by", "decomposed by", "parts at", "preconditioned by")),
    )
    footer = (
        f"{_count(len(plan.blocks), 'block')} with {_count(len(plan.factors), 'factor')} on "
        f"{_count(size, 'rank')}, {_count(len(plan.buckets), 'exchange')} per update"
    )
    return Table(f"Plan {plan.strategy}", columns, rows, footer)


def by_rank(plan: Plan) -> Table:
    """What every rank keeps, sends and computes; ranks with the same numbers in one row.

    Arguments:
        plan: what is printed.
    """
    same: dict[tuple[str, ...], list[int]] = {}
    decompose, precondition = (work / 1e9 for work in plan.work_of_all())
    cells_of: dict[tuple[float, ...], tuple[str, ...]] = {}  # texts take longer than numbers
    for rank in plan.world.ranks:
        kept, sent = plan.memory(rank), plan.sent(rank)
        sizes = (
            *(kept.factors, kept.inverses, kept.prepared + kept.stacks, kept.passing),
            *(sent.factors, sent.inverses, sent.gradients),
        )
        work = (float(decompose[rank]), float(precondition[rank]))
        if (cells := cells_of.get((*sizes, *work))) is None:
            cells = (*map(bytes_text, sizes), *(f"{each:.3g}" for each in work))
            cells_of[*sizes, *work] = cells
        same.setdefault(cells, []).append(rank)
    names = (
        "rank",
        "factors kept",
        "inverses kept",
        "buffers kept",
        "passing",
        "sent per update",
        "sent per refresh",
        "sent per step",
        "Gflop per refresh",
        "Gflop per step",
    )
    columns = tuple(Column(name, "right") for name in names)
    rows = tuple((ranks_text(as_ranks(ranks), 0), *cells) for cells, ranks in same.items())
    mean = plan.mean_memory
    footer = f"memory: {bytes_text(plan.most_memory)} at most, {bytes_text(mean)} on average"
    if balanced := plan.routes.balanced:
        footer += f"; in even slices: {', '.join(balanced)}"
    return Table("Ranks", columns, rows, footer)


def ranks_text(ranks: Ranks, size: int) -> str:
    """(0, 1, 2, 3) -> '0..3', (0, 4, 8, 12) -> '0,4..12', all of several -> 'all', many without an
    order -> '0,3,4 and 17 more'.

    Arguments:
        ranks: in increasing order.
        size: number of all ranks: if ``ranks`` are all of several, the text is 'all'.
    """
    if len(ranks) == size > 1:
        return "all"
    if isinstance(ranks, range) and len(ranks) > 3:
        first, second, last = ranks[0], ranks[1], ranks[-1]
        return f"{first}..{last}" if ranks.step == 1 else f"{first},{second}..{last}"
    shown = ",".join(map(str, ranks[:_MOST]))
    return shown if len(ranks) <= _MOST else f"{shown} and {len(ranks) - _MOST} more"


def _sizes(spec: FactorSpec) -> str:
    sides = f"{spec.dim}" if spec.diagonal else f"{spec.dim} x {spec.dim}"
    return sides if spec.batch == 1 else f"{spec.batch} x {sides}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
