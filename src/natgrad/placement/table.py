"""A plan as two tables: by factor who does what, and by rank what that costs."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from natgrad.specs import FactorSpec, Ranks
from natgrad.tables import Column, Table, bytes_text

if TYPE_CHECKING:
    from natgrad.placement.plan import Plan


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
    """What every rank keeps, sends and computes.

    Arguments:
        plan: what is printed.
    """
    rows, totals = [], []
    for rank, sent in enumerate(plan.sent_by_all()):
        kept, work = plan.memory(rank), plan.work(rank)
        traffic = (sent.factors, sent.inverses, sent.gradients)
        totals.append(kept.total)
        rows.append(
            (
                str(rank),
                bytes_text(kept.factors),
                bytes_text(kept.inverses),
                *map(bytes_text, traffic),
                f"{work.decompose / 1e9:.3g}",
                f"{work.precondition / 1e9:.3g}",
            )
        )
    names = (
        "rank",
        "factors kept",
        "inverses kept",
        "sent per update",
        "sent per refresh",
        "sent per step",
        "Gflop per refresh",
        "Gflop per step",
    )
    columns = tuple(Column(name, "right") for name in names)
    mean = sum(totals) / len(totals)
    footer = f"memory: {bytes_text(max(totals))} at most, {bytes_text(mean)} on average"
    return Table("Ranks", columns, tuple(rows), footer)


def ranks_text(ranks: Ranks, size: int) -> str:
    """(0, 1, 2, 3) -> '0..3', (0, 4, 8, 12) -> '0,4..12', all of several -> 'all'.

    Arguments:
        ranks: in increasing order.
        size: number of all ranks: if ``ranks`` are all of several, the text is 'all'.
    """
    if len(ranks) == size > 1:
        return "all"
    steps = {b - a for a, b in pairwise(ranks)}
    if len(ranks) > 3 and len(steps) == 1:
        first, second, last = ranks[0], ranks[1], ranks[-1]
        return f"{first}..{last}" if steps == {1} else f"{first},{second}..{last}"
    return ",".join(map(str, ranks))


def _sizes(spec: FactorSpec) -> str:
    sides = f"{spec.dim}" if spec.diagonal else f"{spec.dim} x {spec.dim}"
    return sides if spec.batch == 1 else f"{spec.batch} x {sides}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
