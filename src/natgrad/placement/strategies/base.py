"""From who works for each block to a plan: what every strategy has in common.

Given a `Duty` for each block, all messages follow: contributions to a factor are reduced to the
ranks that decompose it, parts are broadcast to the workers that did not, gradients are gathered by
the workers, and preconditioned gradients are returned to those that hold them.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush
from typing import Protocol

from natgrad.errors import SettingError
from natgrad.placement.cluster import Cluster
from natgrad.placement.ops import (
    ApplyOp,
    Decompose,
    Gather,
    Precondition,
    Reduce,
    ReduceGradient,
    RefreshOp,
    Return,
    Rows,
    Share,
    TotalGradients,
)
from natgrad.placement.plan import Plan
from natgrad.placement.simulator import with_routes
from natgrad.placement.world import World
from natgrad.specs import BlockSpec, Ranks, as_ranks, server


class Placement(Protocol):
    """Which rank does what: a pure function, so that every rank finds the same plan."""

    def __call__(self, blocks: Sequence[BlockSpec], world: World) -> Plan:
        """The plan of a model.

        Arguments:
            blocks: sizes of all blocks, in the order of the model.
            world: number of ranks, and what else a plan depends on.
        """
        ...


@dataclass(frozen=True, slots=True)
class Duty:
    """Who works for one block.

    Arguments:
        workers: ranks that precondition it, at least one.
        decomposers: by the name of each decomposed factor, the rank that decomposes it, or several
            of the workers, each of which makes some rows of its inverse (`FactorSpec.split`).
    """

    workers: Ranks
    decomposers: Mapping[str, int | Ranks]

    def ranks(self, name: str) -> Ranks:
        """Who decomposes a factor.

        Arguments:
            name: of the factor.
        """
        found = self.decomposers[name]
        return range(found, found + 1) if isinstance(found, int) else as_ranks(found)

    def together(self, block: BlockSpec, name: str) -> Ranks:
        """Where a factor must be known: who decomposes it, and, where the damping of one depends on
        the others or some are merged, who decomposes any of them.

        Arguments:
            block: the one that this is the duty for.
            name: of one of its factors that is not in a basis.
        """
        names = block.decomposed if block.together else (name,)
        return as_ranks(rank for one in names for rank in self.ranks(one))


def longest_first(costs: Sequence[float], machines: int) -> list[int]:
    """The machine of each job: the longest jobs first, each to the least loaded machine. The
    longest load is at most 4/3 - 1/(3 machines) of the shortest possible one (Graham 1969).

    Arguments:
        costs: of the jobs.
        machines: how many there are, at least 1.
    """
    # Equal machines are taken in their order, so that no more than there are jobs are looked at.
    load = [(0.0, machine) for machine in range(min(machines, len(costs)))]
    heapify(load)
    machine_of = [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda job: -costs[job]):
        least, machine = heappop(load)
        heappush(load, (least + costs[job], machine))
        machine_of[job] = machine
    return machine_of


def assemble(
    strategy: str,
    blocks: Sequence[BlockSpec],
    world: World,
    duties: Sequence[Duty],
    *,
    reduces: bool = True,
    scatters: bool = False,
    cluster: Cluster | None = None,
) -> Plan:
    """The plan that follows from who works for each block: every reduction, decomposition and
    message.

    Arguments:
        strategy: name of the placement, for print.
        blocks: sizes of all blocks, with names of their own.
        world: number of ranks, and how gradients lie on them.
        duties: who works for each block, in the order of ``blocks``.
        reduces: whether factors are made of all ranks' data; otherwise each keeper uses its own
            data alone.
        scatters: whether local gradients are summed only where they are preconditioned
            (reduce-scatter); otherwise everywhere (all-reduce). Without effect where DDP or FSDP
            sums them.
        cluster: whose links decide by which routes everything travels; ``None`` is ``Cluster()``.
    """
    _check(blocks, world)
    pairs = list(zip(blocks, duties, strict=True))
    alone = world.size == 1
    update: list[Reduce] = []
    if reduces and not alone:
        for block, duty in reversed(pairs):  # as a backward pass meets them
            update += _reduces(block, duty)
    refresh: list[RefreshOp] = [
        Decompose((block.name, name), rank, rows)
        for block, duty in pairs
        for name in block.decomposed
        for rank, rows in _shared_out(block, duty, name)
    ]
    apply: list[ApplyOp] = []
    local = world.gradients_are_local and not alone
    if local and not scatters and blocks:
        apply.append(TotalGradients(tuple(block.name for block in blocks)))
    for block, duty in pairs:
        # Statistics in a basis are made wherever there are data that count.
        in_need = world.ranks if block.basis_everywhere and reduces else duty.workers
        refresh += _shares(block, duty, in_need)
        if local and scatters:
            apply.append(ReduceGradient(block.name, duty.workers))
        else:
            apply += _gathers(block, duty, world)
    apply += [Precondition(block.name, duty.workers) for block, duty in pairs]
    for block, duty in pairs:
        apply += _returns(block, duty, world)
    made = Plan(strategy, world, tuple(blocks), tuple(update), tuple(refresh), tuple(apply))
    return with_routes(made, cluster or Cluster())


def _reduces(block: BlockSpec, duty: Duty) -> Iterator[Reduce]:
    for name, _ in block.factors:
        if name in block.in_basis:
            yield Reduce((block.name, name), duty.workers)
        else:
            yield Reduce((block.name, name), duty.together(block, name))


def _shares(block: BlockSpec, duty: Duty, in_need: Ranks) -> Iterator[Share]:
    for name in block.decomposed:
        for source, rows in _shared_out(block, duty, name):
            if len(in_need) > 1 or source not in in_need:
                yield Share((block.name, name), source, as_ranks(in_need), rows)


def _shared_out(block: BlockSpec, duty: Duty, name: str) -> Iterator[tuple[int, Rows | None]]:
    """The ranks that decompose a factor, each with its rows of the inverse if they are several."""
    ranks, dim = duty.ranks(name), block.factor(name).dim
    if len(ranks) == 1:
        yield ranks[0], None
        return
    fits = block.factor(name).can_be_split and not block.merged and not block.in_basis
    if not fits or len(ranks) > dim or not all(rank in duty.workers for rank in ranks):
        raise SettingError(
            f"Factor {name} of block {block.name!r} is to be decomposed by ranks {tuple(ranks)} "
            f"together, but only an inverse of {dim} rows that is made row by row, as Cholesky's, "
            "can be shared out, and only among ranks that precondition with it: name one rank."
        )
    for index, rank in enumerate(ranks):
        yield rank, (index * dim // len(ranks), (index + 1) * dim // len(ranks))


def _gathers(block: BlockSpec, duty: Duty, world: World) -> Iterator[Gather]:
    if world.size > 1:
        for index, piece in enumerate(block.pieces):
            whole = piece.chunk is None
            if not (whole and all(rank in piece.holders for rank in duty.workers)):
                yield Gather(block.name, index, duty.workers)


def _returns(block: BlockSpec, duty: Duty, world: World) -> Iterator[Return]:
    """To all holders, unless every rank is its own source."""
    if len(duty.workers) == world.size:
        return
    for index, piece in enumerate(block.pieces):
        if any(server(duty.workers, rank, world.size) != rank for rank in piece.holders):
            yield Return(block.name, index, duty.workers, piece.holders)
    nothing = _others(tuple(piece.holders for piece in block.pieces), world.size)
    if nothing:
        yield Return(block.name, None, duty.workers, nothing)


@lru_cache(maxsize=256)
def _others(holders: tuple[Ranks, ...], world: int) -> Ranks:
    """The ranks that are in none of some sets."""
    everyone = range(world)
    if any(ranks == everyone for ranks in holders):
        return range(0)
    having = set().union(*holders)
    return as_ranks(rank for rank in everyone if rank not in having)


def _check(blocks: Sequence[BlockSpec], world: World) -> None:
    names = [block.name for block in blocks]
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise SettingError(
            f"Two blocks are named {twice[0]!r} but a plan tells blocks apart by their names: give "
            "each its own."
        )
    for block in blocks:
        for piece in block.pieces:
            piece.check(block.name, world.size)
            held = 1 if piece.chunk is not None else len(piece.holders)
            if world.gradients_are_local and held < world.size:
                raise SettingError(
                    f"World.gradients_are_local is True but a piece of block {block.name!r} is "
                    f"held by only {held} of {world.size} ranks: local gradients are whole, so "
                    "pass it for unsharded models only."
                )
