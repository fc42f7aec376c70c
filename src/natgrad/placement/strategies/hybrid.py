"""KAISA's grid (Pauloski 2021): of W ranks, ``fraction`` W precondition a block and send the result
to the others.

The ranks form a grid whose columns precondition: each column has ``fraction`` W ranks, and a rank
sends results along its row. All ranks in one column is COMM-OPT, one rank a column is MEM-OPT; from
the first to the second, memory falls and the bytes of a step rise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from natgrad.checks import check_positive_fields
from natgrad.errors import SettingError
from natgrad.placement.cost import CostModel, Flops
from natgrad.placement.plan import Plan
from natgrad.placement.strategies.base import Duty, assemble, join_idle, longest_first
from natgrad.placement.world import World
from natgrad.specs import BlockSpec, Ranks


@dataclass(frozen=True, slots=True)
class Hybrid:
    """Some of the ranks precondition each block, and send the result to the others.

    Arguments:
        fraction: share of the W ranks that precondition a block, from 1/W (`MemOpt`) to 1
            (`CommOpt`). ``fraction`` W is rounded to a whole number, at least 1, which must divide
            W; otherwise making a plan raises `SettingError`.
        cost: what decompositions and preconditioning cost, for balancing the load of the ranks.
    """

    fraction: float
    cost: CostModel = field(default=Flops(), kw_only=True)

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
        return assemble(name, blocks, world, grid(blocks, world, workers, self.cost))


@dataclass(frozen=True, slots=True)
class MemOpt:
    """One rank owns each block, keeps all of it, and sends its preconditioned gradient to the
    others: the least memory.

    MEM-OPT of KAISA, K-FAC-lw of Pauloski 2022, sec. 6.4.1.

    Arguments:
        cost: what decompositions and preconditioning cost, for balancing the load of the ranks.
    """

    cost: CostModel = field(default=Flops(), kw_only=True)

    def __call__(self, blocks: Sequence[BlockSpec], world: World) -> Plan:
        return assemble("MemOpt()", blocks, world, grid(blocks, world, 1, self.cost))


@dataclass(frozen=True, slots=True)
class CommOpt:
    """Every rank holds all inverses and preconditions everything: where all ranks have all
    gradients, nothing is sent on a step that neither updates nor refreshes.

    COMM-OPT of KAISA, K-FAC-opt of Pauloski 2022, sec. 4.3.

    Arguments:
        cost: what decompositions and preconditioning cost, for balancing the load of the ranks.
    """

    cost: CostModel = field(default=Flops(), kw_only=True)

    def __call__(self, blocks: Sequence[BlockSpec], world: World) -> Plan:
        return assemble("CommOpt()", blocks, world, grid(blocks, world, world.size, self.cost))


def divisors(size: int) -> list[int]:
    """All divisors of a number of ranks, in increasing order.

    Arguments:
        size: the number, at least 1.
    """
    return [k for k in range(1, size + 1) if size % k == 0]


def grid(blocks: Sequence[BlockSpec], world: World, workers: int, cost: CostModel) -> list[Duty]:
    """Blocks go to columns of ``workers`` ranks each, by what they cost from one refresh to the
    next; then the factors of a column go to its ranks (Pauloski 2022, sec. 4.3).

    Arguments:
        blocks: sizes of all blocks.
        world: number of ranks, and steps between two refreshes.
        workers: ranks in a column, a divisor of the number of ranks.
        cost: what decompositions and preconditioning cost, for balancing the load of the ranks.
    """
    count = world.size // workers
    loads = [
        sum(cost.decompose(block.factor(name)) for name in block.decomposed)
        + workers * world.refresh_every * cost.precondition(block)
        for block in blocks
    ]
    column_of = longest_first(loads, count)
    decomposers: list[dict[str, Ranks]] = [{} for _ in blocks]
    columns = [tuple(range(column, world.size, count)) for column in range(count)]
    for column, ranks in enumerate(columns):
        mine = [i for i in range(len(blocks)) if column_of[i] == column]
        jobs = [(i, names) for i in mine for names in _units(blocks[i])]
        for (i, names), team in zip(jobs, _teams(blocks, jobs, ranks, world, cost), strict=True):
            decomposers[i].update(dict.fromkeys(names, team))
    return [Duty(columns[column_of[i]], decomposers[i]) for i in range(len(blocks))]


def _units(block: BlockSpec) -> list[tuple[str, ...]]:
    """Factors that must be decomposed at one place, in sets of those."""
    return [block.decomposed] if block.together else [(name,) for name in block.decomposed]


def _teams(
    blocks: Sequence[BlockSpec],
    jobs: list[tuple[int, tuple[str, ...]]],
    ranks: Ranks,
    world: World,
    cost: CostModel,
) -> list[Ranks]:
    """The ranks of a column that do each job: one, or more if there would be idle ones."""
    specs = [[blocks[i].factor(name) for name in names] for i, names in jobs]
    costs = [sum(cost.decompose(spec) for spec in job) for job in specs]
    teams = [[ranks[place]] for place in longest_first(costs, len(ranks))]
    busy = {team[0] for team in teams}
    parts = [sum(spec.parts for spec in job) for job in specs]
    join_idle([rank for rank in ranks if rank not in busy], teams, parts)
    return [tuple(sorted(team)) for team in teams]
