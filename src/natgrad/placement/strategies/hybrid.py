"""KAISA's grid (Pauloski 2021): of W ranks, ``fraction`` W precondition a block and send the result
to the others.

Each factor is decomposed by one rank, whatever their number: where ranks outnumber factors the
others would only repeat it, and as results travel in even slices, more ranks that have one would
not send it any faster.

The ranks form a grid whose columns precondition: each column has ``fraction`` W ranks, and a rank
sends results along its row. All ranks in one column is COMM-OPT, one rank a column is MEM-OPT; from
the first to the second, memory falls and the bytes of a step rise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import isqrt, log2

from natgrad.checks import check_positive_fields
from natgrad.errors import SettingError
from natgrad.placement.cluster import Cluster
from natgrad.placement.cost import CostModel, Flops
from natgrad.placement.plan import Plan
from natgrad.placement.simulator import simulate
from natgrad.placement.strategies.base import Duty, assemble, longest_first
from natgrad.placement.strategies.sharing_out import Job, share_out
from natgrad.placement.world import World
from natgrad.specs import BlockSpec, Ranks, as_ranks


@dataclass(frozen=True, slots=True)
class Hybrid:
    """Some of the ranks precondition each block, and send the result to the others.

    Arguments:
        fraction: share of the W ranks that precondition a block, from 1/W (`MemOpt`) to 1
            (`CommOpt`). ``fraction`` W is rounded to a whole number, at least 1, which must divide
            W; otherwise making a plan raises `SettingError`.
        cost: what decompositions and preconditioning cost, for balancing the load of the ranks.
        cluster: whose links decide by which routes everything travels.
    """

    fraction: float
    cost: CostModel = field(default=Flops(), kw_only=True)
    cluster: Cluster = field(default=Cluster(), kw_only=True, repr=False)

    def __post_init__(self) -> None:
        check_positive_fields(self, "fraction", high=1)

    def __call__(self, blocks: Sequence[BlockSpec], world: World) -> Plan:
        workers = max(1, round(world.size * self.fraction))
        if world.size % workers:
            allowed = ", ".join(str(Fraction(k, world.size)) for k in divisors(world.size))
            raise SettingError(
                f"Hybrid.fraction is {self.fraction!r}, which lets {workers} of {world.size} ranks "
                f"precondition a block, but that number must divide {world.size}: pass one of "
                f"{allowed}."
            )
        name = f"Hybrid({Fraction(workers, world.size)})"
        return placed(name, blocks, world, workers, self.cost, self.cluster)


@dataclass(frozen=True, slots=True)
class MemOpt:
    """One rank owns each block, keeps all of it, and sends its preconditioned gradient to the
    others: the least memory.

    MEM-OPT of KAISA, K-FAC-lw of Pauloski 2022, sec. 6.4.1.

    Arguments:
        cost: what decompositions and preconditioning cost, for balancing the load of the ranks.
        cluster: whose links decide by which routes everything travels.
    """

    cost: CostModel = field(default=Flops(), kw_only=True)
    cluster: Cluster = field(default=Cluster(), kw_only=True, repr=False)

    def __call__(self, blocks: Sequence[BlockSpec], world: World) -> Plan:
        duties = grid(blocks, world, 1, self.cost)
        return assemble("MemOpt()", blocks, world, duties, cluster=self.cluster)


@dataclass(frozen=True, slots=True)
class CommOpt:
    """Every rank holds all inverses and preconditions everything: where all ranks have all
    gradients, nothing is sent on a step that neither updates nor refreshes.

    COMM-OPT of KAISA, K-FAC-opt of Pauloski 2022, sec. 4.3.

    Arguments:
        cost: what decompositions and preconditioning cost, for balancing the load of the ranks.
        cluster: whose links decide by which routes everything travels.
    """

    cost: CostModel = field(default=Flops(), kw_only=True)
    cluster: Cluster = field(default=Cluster(), kw_only=True, repr=False)

    def __call__(self, blocks: Sequence[BlockSpec], world: World) -> Plan:
        return placed("CommOpt()", blocks, world, world.size, self.cost, self.cluster)


def divisors(size: int) -> list[int]:
    """All divisors of a number of ranks, in increasing order.

    Arguments:
        size: the number, at least 1.
    """
    low = [k for k in range(1, isqrt(size) + 1) if size % k == 0]
    return sorted({*low, *(size // k for k in low)})


def some_divisors(size: int, most: int = 12) -> list[int]:
    """Divisors of a number of ranks, in increasing order: all, or, if they are many, those next to
    powers of four. Seconds are so flat around the best one that nothing between them is missed.

    Arguments:
        size: the number, at least 1.
        most: how many are all taken.
    """
    found = divisors(size)
    if len(found) <= most:
        return found
    powers = [4**k for k in range((size.bit_length() + 1) // 2)]
    near = {min(found, key=lambda k: abs(log2(k / power))) for power in powers}
    return sorted({1, *near, size})


def placed(
    name: str,
    blocks: Sequence[BlockSpec],
    world: World,
    workers: int,
    cost: CostModel,
    cluster: Cluster,
) -> Plan:
    """The plan of a grid: with decompositions that several ranks share out, if it is faster so.

    Arguments:
        name: of the placement, for print.
        blocks: sizes of all blocks.
        world: number of ranks, and how often what is done.
        workers: ranks in a column, a divisor of the number of ranks.
        cost: what decompositions and preconditioning cost.
        cluster: speed of ranks and links.
    """
    alone, shared = (grid(blocks, world, workers, cost, one) for one in (None, cluster))
    plan = assemble(name, blocks, world, alone, cluster=cluster)
    if shared == alone:
        return plan
    other = assemble(name, blocks, world, shared, cluster=cluster)
    often = world.update_every, world.refresh_every
    before, after = (simulate(p, cluster, cost).step_seconds(*often) for p in (plan, other))
    return other if after < before else plan


def grid(
    blocks: Sequence[BlockSpec],
    world: World,
    workers: int,
    cost: CostModel,
    cluster: Cluster | None = None,
) -> list[Duty]:
    """Blocks go to columns of ``workers`` ranks each, by what they cost from one refresh to the
    next; then the factors of a column go to its ranks (Pauloski 2022, sec. 4.3).

    Arguments:
        blocks: sizes of all blocks.
        world: number of ranks, and steps between two refreshes.
        workers: ranks in a column, a divisor of the number of ranks.
        cost: what decompositions and preconditioning cost, for balancing the load of the ranks.
        cluster: whose speed decides which decompositions several ranks share out; ``None`` shares
            out none.
    """
    count = world.size // workers
    loads = [
        sum(cost.decompose(block.factor(name)) for name in block.decomposed)
        + workers * world.refresh_every * cost.precondition(block)
        for block in blocks
    ]
    column_of = longest_first(loads, count)
    decomposers: list[dict[str, int | Ranks]] = [{} for _ in blocks]
    jobs_of: dict[int, list[tuple[int, tuple[str, ...]]]] = {}
    for i, column in enumerate(column_of):
        jobs_of.setdefault(column, []).extend((i, names) for names in _units(blocks[i]))
    if cluster is None or workers == 1:
        for column, jobs in jobs_of.items():
            costs = [sum(cost.decompose(blocks[i].factor(n)) for n in names) for i, names in jobs]
            for (i, names), place in zip(jobs, longest_first(costs, workers), strict=True):
                decomposers[i].update(dict.fromkeys(names, column + place * count))
    else:
        columns = {
            column: [Job(blocks[i], names, cost, cluster, workers) for i, names in jobs]
            for column, jobs in jobs_of.items()
        }
        shared = share_out(columns, workers, world, cluster)
        for column, jobs in jobs_of.items():
            for job, (i, names), places in zip(columns[column], jobs, shared[column], strict=True):
                ranks = as_ranks(column + place * count for place in places)
                for name in names:
                    decomposers[i][name] = (
                        ranks if len(ranks) > 1 and name in job.splits else ranks[0]
                    )
    return [
        Duty(range(column, world.size, count), decomposers[i]) for i, column in enumerate(column_of)
    ]


def _units(block: BlockSpec) -> list[tuple[str, ...]]:
    """Factors that must be decomposed at one place, in sets of those."""
    return [block.decomposed] if block.together else [(name,) for name in block.decomposed]
