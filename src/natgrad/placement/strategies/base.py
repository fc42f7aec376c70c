"""From who works for each block to a plan: what every strategy has in common.

Given a `Duty` for each block, all messages follow: contributions to a factor are reduced to the
ranks that decompose it, parts are broadcast to the workers that did not, gradients are gathered by
the workers, and preconditioned gradients are returned to those that hold them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import Protocol

from natgrad.errors import SettingError
from natgrad.placement.ops import (
    ApplyOp,
    Decompose,
    Gather,
    Precondition,
    Reduce,
    ReduceGradient,
    RefreshOp,
    Return,
    Share,
    TotalGradients,
)
from natgrad.placement.plan import Plan
from natgrad.placement.world import World
from natgrad.specs import BlockSpec, Piece, Ranks


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
        workers: ranks that precondition it, in increasing order, at least one.
        decomposers: by the name of each decomposed factor, the ranks that decompose it, in
            increasing order.
    """

    workers: Ranks
    decomposers: Mapping[str, Ranks]


def longest_first(costs: Sequence[float], machines: int) -> list[int]:
    """The machine of each job: the longest jobs first, each to the least loaded machine. The
    longest load is at most 4/3 - 1/(3 machines) of the shortest possible one (Graham 1969).

    Arguments:
        costs: of the jobs.
        machines: how many there are, at least 1.
    """
    load = [0.0] * machines
    machine_of = [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda job: -costs[job]):
        machine = min(range(machines), key=load.__getitem__)
        load[machine] += costs[job]
        machine_of[job] = machine
    return machine_of


def join_idle(idle: Sequence[int], teams: list[list[int]], sizes: Sequence[float]) -> None:
    """Ranks without work do that of others once more, so that more ranks can hand out its result:
    each joins the team with most to send (``sizes``) per member.

    Arguments:
        idle: ranks without work.
        teams: the ranks of each team, at least one; appended to in place.
        sizes: numbers that each team has to send.
    """
    for rank in idle:
        if teams:
            busiest = max(range(len(teams)), key=lambda team: sizes[team] / len(teams[team]))
            teams[busiest].append(rank)


def dealt(receivers: Sequence[int], sources: Ranks) -> Iterator[tuple[int, Ranks]]:
    """Receivers, in rank order, cut evenly over the sources, in rank order.

    With a column of a grid as sources, each serves the rest of its row (HYBRID-OPT of KAISA).

    Arguments:
        receivers: ranks that need something, in increasing order.
        sources: ranks that have it, in increasing order, at least one.
    """
    for i, source in enumerate(sources):
        first, last = (k * len(receivers) // len(sources) for k in (i, i + 1))
        if first < last:
            yield source, tuple(receivers[first:last])


def assemble(
    strategy: str,
    blocks: Sequence[BlockSpec],
    world: World,
    duties: Sequence[Duty],
    *,
    reduces: bool = True,
    scatters: bool = False,
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
    """
    _check(blocks, world)
    pairs = list(zip(blocks, duties, strict=True))
    alone = world.size == 1
    update: list[Reduce] = []
    if reduces and not alone:
        for block, duty in reversed(pairs):  # as a backward pass meets them
            update += _reduces(block, duty)
    refresh: list[RefreshOp] = [
        Decompose((block.name, name), duty.decomposers[name])
        for block, duty in pairs
        for name in block.decomposed
    ]
    apply: list[ApplyOp] = []
    local = world.gradients_are_local and not alone
    if local and not scatters and blocks:
        apply.append(TotalGradients(tuple(block.name for block in blocks)))
    gathers = _Gathers(world)
    for block, duty in pairs:
        # Statistics in a basis are made wherever there are data that count.
        in_need = world.ranks if block.basis_everywhere and reduces else duty.workers
        refresh += _shares(block, duty, in_need)
        if local and scatters:
            apply.append(ReduceGradient(block.name, duty.workers))
        else:
            apply += gathers(block, duty)
    apply += [Precondition(block.name, duty.workers) for block, duty in pairs]
    for block, duty in pairs:
        apply += _returns(block, duty, world)
    return Plan(strategy, world, tuple(blocks), tuple(update), tuple(refresh), tuple(apply))


def _reduces(block: BlockSpec, duty: Duty) -> Iterator[Reduce]:
    for name, _ in block.factors:
        if name in block.in_basis:
            to = duty.workers
        else:
            to = duty.decomposers[block.decomposed[0] if name in block.merged else name]
        yield Reduce((block.name, name), to)


def _shares(block: BlockSpec, duty: Duty, in_need: Ranks) -> Iterator[Share]:
    for name in block.decomposed:
        makers = duty.decomposers[name]
        for source, to in dealt(sorted(set(in_need).difference(makers)), makers):
            yield Share((block.name, name), source, to)


class _Gathers:
    """Each piece from the holder that has sent the least so far. A large world has tens of
    thousands of pieces, so which ranks lack one is found once for all that have the same holders.
    """

    def __init__(self, world: World) -> None:
        self.sent = [0] * world.size
        self._lacking: dict[Ranks, dict[Ranks, Ranks]] = {}  # by workers, then holders

    def __call__(self, block: BlockSpec, duty: Duty) -> Iterator[Gather]:
        lacking = self._lacking.setdefault(duty.workers, {})
        for index, piece in enumerate(block.pieces):
            if piece.holders not in lacking:
                have = set(piece.holders)
                lacking[piece.holders] = tuple(rank for rank in duty.workers if rank not in have)
            if ranks := lacking[piece.holders]:
                for source, to in self._served(piece, ranks):
                    yield Gather(block.name, index, source, to)

    def _served(self, piece: Piece, ranks: Ranks) -> list[tuple[int, Ranks]]:
        """Which of ``ranks`` each holder sends its piece to, in the order of holders."""
        numel = piece.numel
        if len(piece.holders) == 1:
            (source,) = piece.holders
            self.sent[source] += numel * len(ranks)
            return [(source, ranks)]
        served: dict[int, list[int]] = {}
        queue = [(self.sent[holder], holder) for holder in set(piece.holders)]
        heapify(queue)
        for rank in ranks:
            sent, source = queue[0]
            heapreplace(queue, (sent + numel, source))
            served.setdefault(source, []).append(rank)
        for sent, source in queue:
            self.sent[source] = sent
        return [(source, tuple(served[source])) for source in sorted(served)]


def _returns(block: BlockSpec, duty: Duty, world: World) -> Iterator[Return]:
    others = sorted(set(world.ranks).difference(duty.workers))
    server = {rank: source for source, ranks in dealt(others, duty.workers) for rank in ranks}
    nothing = set(world.ranks).difference(*(piece.holders for piece in block.pieces))
    having = [*enumerate(piece.holders for piece in block.pieces), (None, tuple(nothing))]
    for index, ranks in having:
        served: dict[int, list[int]] = {}
        for rank in sorted(set(ranks) & server.keys()):
            served.setdefault(server[rank], []).append(rank)
        for source in sorted(served):
            yield Return(block.name, index, source, tuple(served[source]))


def _check(blocks: Sequence[BlockSpec], world: World) -> None:
    names = [block.name for block in blocks]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SettingError(
            f"Two blocks are named {twice[0]!r} but a plan tells blocks apart by their names: give "
            "each its own."
        )
    everyone = set(world.ranks)
    for block in blocks:
        for piece in block.pieces:
            if not piece.holders or not everyone.issuperset(piece.holders):
                raise SettingError(
                    f"A piece of block {block.name!r} is held by ranks {piece.holders!r} but must "
                    f"be held by some of the ranks 0 to {world.size - 1}: pass the holders as "
                    "ranks of the group that shares the work."
                )
            if world.gradients_are_local and len(set(piece.holders)) < world.size:
                raise SettingError(
                    f"World.gradients_are_local is True but a piece of block {block.name!r} is "
                    f"held by only {len(set(piece.holders))} of {world.size} ranks: local "
                    "gradients are whole, so pass it for unsharded models only."
                )
