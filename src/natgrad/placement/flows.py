"""How many bytes every rank sends and receives for some ops, without listing their messages.

Numbers are kept by rank in arrays, and ops that concern the same ranks are added up first, so that
a plan of ten thousand ranks takes no longer than its ops.

    direct      as `messages` lists them
    balanced    sums      (W - 1) slices of a bucket, and finished slices to the ranks that keep
                copies    slices to the members of a group, and (g - 1) slices among these
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from natgrad.placement.ops import Gather, Op, Reduce, ReduceGradient, Return, Share
from natgrad.placement.rank_arrays import Numbers, as_array, common, rows_of
from natgrad.placement.routes import Groups, Routes
from natgrad.placement.slices import Slices
from natgrad.specs import Piece, Ranks

if TYPE_CHECKING:
    from natgrad.placement.travel import Travel

Costs = NDArray[np.float64]


class Flows(NamedTuple):
    """Bytes of messages by rank.

    Arguments:
        sent: bytes that rank 0, 1, … sends to others.
        received: bytes that each receives from others.
    """

    sent: Numbers
    received: Numbers

    @classmethod
    def none(cls, ranks: int) -> Flows:
        """No bytes yet.

        Arguments:
            ranks: how many there are.
        """
        return cls(np.zeros(ranks, np.int64), np.zeros(ranks, np.int64))

    def add(self, call: Collective) -> None:
        """Add the bytes of a collective, in place.

        Arguments:
            call: any.
        """
        if call.flows is not None:
            self.sent[:] += call.flows.sent
            self.received[:] += call.flows.received
        elif call.groups is not None:
            for target in self:
                add(target, call.groups.members, call.around)

    @property
    def busiest(self) -> int:
        """Bytes of the rank that sends or receives most."""
        return int(max(self.sent.max(initial=0), self.received.max(initial=0)))


@dataclass(frozen=True)
class Collective:
    """One call of a collective: an all-to-all of all ranks, or, in each of some groups, a
    reduce-scatter or an all-gather of even slices.

    Arguments:
        flows: bytes by rank of an all-to-all; ``None`` of even slices.
        groups: among which slices are even; ``None`` of an all-to-all.
        around: bytes that every rank of the groups sends, and receives, of even slices.
    """

    flows: Flows | None = None
    groups: Groups | None = None
    around: int = 0


def collectives_of(
    plan: Travel, ops: Iterable[Op], routes: Routes | None = None, *, fused: bool = False
) -> list[Collective]:
    """The calls that some ops make, in their order: every bucket of direct ones an all-to-all;
    every bucket of sums a reduce-scatter, and one all-to-all for the finished slices of all; one
    all-to-all for the slices of copies, and an all-gather for every bucket of them.

    Arguments:
        plan: what the ranks do.
        ops: some of the plan's, in its order; all-reduces are none of these.
        routes: other ones than the plan's own.
        fused: whether all direct ones are one all-to-all instead, however large.
    """
    direct, summed, copied = plan.sorted_by_route(ops, routes)
    found = []
    for bucket in [direct] if fused else plan.cut(direct):
        count = _Count(plan)
        for op in bucket:
            count.direct(op)
        found.append(Collective(count.flows()))
    finished, everyone = _Count(plan), Groups(plan.world.ranks, 1)
    for bucket in plan.cut(summed):
        slices = Slices([plan.numbers(op) for op in bucket], plan.world_size)
        finished.finished(bucket, slices)
        found.append(_ring(plan, bucket, slices, everyone))
    if summed:
        found.append(Collective(finished.flows()))
    spread, rings = _Count(plan), []
    for groups, some in copied.items():
        row = Row.of(groups.size)
        for bucket in plan.cut(some):
            slices = Slices([plan.copied_numbers(op) for op in bucket], groups.size)
            spread.spread(bucket, slices, groups, row)
            rings.append(_ring(plan, bucket, slices, groups))
        spread.add_row(groups, row)
    if rings:
        found.append(Collective(spread.flows()))
    return found + rings


def _ring(plan: Travel, ops: Sequence[Op], slices: Slices, groups: Groups) -> Collective:
    """Every member passes on all slices but one."""
    around = (groups.size - 1) * plan.wire_bytes(ops[0], slices.each)
    return Collective(groups=groups, around=around)


def flows_of(plan: Travel, ops: Iterable[Op]) -> Flows:
    """Bytes of some ops, each by its route.

    Arguments:
        plan: what the ranks do.
        ops: some of the plan's, in its order; all-reduces count nothing here.
    """
    total = Flows.none(plan.world_size)
    for call in collectives_of(plan, ops, fused=True):  # only the sum of buckets counts
        total.add(call)
    return total


class Row(NamedTuple):
    """Bytes by place in a group, the same in all groups of a kind."""

    sent: Numbers
    received: Numbers

    @classmethod
    def of(cls, size: int) -> Row:
        return cls(np.zeros(size, np.int64), np.zeros(size, np.int64))


class _Count:
    def __init__(self, plan: Travel) -> None:
        self.plan, self.world = plan, plan.world_size
        self.sent, self.received = (np.zeros(self.world, np.int64) for _ in range(2))
        # Bytes to be added for all of some ranks, and pieces that go from some ranks to others.
        self._sent: dict[Ranks, int] = {}
        self._received: dict[Ranks, int] = {}
        self._gathered: dict[tuple[Ranks, Ranks], int] = {}
        self._returned: dict[tuple[Ranks, Ranks], int] = {}

    def flows(self) -> Flows:
        for (to, holders), size in self._gathered.items():
            self._gather(to, holders, size)
        for (sources, to), size in self._returned.items():
            self._return(sources, to, size)
        for target, amounts in ((self.sent, self._sent), (self.received, self._received)):
            for ranks, size in amounts.items():
                add(target, ranks, size)
        return Flows(self.sent, self.received)

    def send(self, ranks: Ranks, size: int) -> None:
        self._sent[ranks] = self._sent.get(ranks, 0) + size

    def receive(self, ranks: Ranks, size: int) -> None:
        self._received[ranks] = self._received.get(ranks, 0) + size

    # One by one.

    def direct(self, op: Op) -> None:
        size = self.plan.copy_bytes(op)
        match op:
            case Reduce(_, to) | ReduceGradient(_, to):
                self.send(range(self.world), size * len(to))
                self.send(to, -size)
                self.receive(to, size * (self.world - 1))
            case Share(_, source, to):
                self.send(range(source, source + 1), size * (len(to) - 1))
                self.receive(to, size)
                self.receive(range(source, source + 1), -size)
            case Gather(_, _, to):
                self._gather_piece(op, self.plan.piece(op), to)
            case Return():
                self._return_piece(op)
            case _:
                pass

    def _gather_piece(self, op: Gather, piece: Piece, to: Ranks) -> None:
        if piece.chunk is None:
            if not (piece.holders == range(self.world) or piece.holders == to):
                key = to, piece.holders
                self._gathered[key] = self._gathered.get(key, 0) + self.plan.copy_bytes(op)
            return
        parts = self.plan.wire_bytes(op, _parts(piece))
        holders = as_array(piece.holders)
        self.sent[places(piece.holders)] += parts * len(to)
        self.receive(to, int(parts.sum()))
        own = common(piece.holders, to)
        for target in (self.sent, self.received):
            target[holders[own]] -= parts[own]

    def _gather(self, to: Ranks, holders: Ranks, size: int) -> None:
        workers, having = as_array(to), as_array(holders)
        workers = workers[~np.isin(workers, having, assume_unique=True)]
        np.add.at(self.sent, having[workers * len(having) // self.world], size)
        self.received[workers] += size

    def _return_piece(self, op: Return) -> None:
        plan, clipped = self.plan, self.plan.clipped[op]
        if op.piece is not None and (piece := plan.piece(op)).chunk is not None:
            clips: int | Numbers = 1 if clipped == op.to else 0
            if clipped and clipped != op.to:
                there = np.isin(as_array(op.to), as_array(clipped), assume_unique=True)
                clips = there.astype(np.int64)
            self._return(op.sources, op.to, plan.wire_bytes(op, _parts(piece) + clips))
            return
        alone = plan.copy_bytes(op)
        self._later(op.sources, op.to, alone)
        self._later(op.sources, clipped, plan.wire_bytes(op, plan.numbers(op) + 1) - alone)

    def _later(self, sources: Ranks, to: Ranks, size: int) -> None:
        if to:
            self._returned[sources, to] = self._returned.get((sources, to), 0) + size

    def _return(self, sources: Ranks, to: Ranks, size: int | Numbers) -> None:
        sizes = np.broadcast_to(np.asarray(size, np.int64), (len(to),))
        if len(sources) == 1:
            (source,) = sources
            mine = int(sizes[to.index(source)]) if source in to else 0
            self.received[places(to)] += sizes
            self.received[source] -= mine
            self.sent[source] += int(sizes.sum()) - mine
            return
        rows = rows_of(to, len(sources), self.world)
        total = np.bincount(rows, sizes, len(sources)).astype(np.int64)  # whole numbers below 2^53
        self.sent[places(sources)] += total
        self.received[places(to)] += sizes
        same = common(to, sources)  # those that may be their own source
        ranks = as_array(to)[same]
        own = as_array(sources)[rows[same]] == ranks
        for target in (self.sent, self.received):
            target[ranks[own]] -= sizes[same[own]]

    # In even slices.

    def finished(self, ops: Sequence[Op], slices: Slices) -> None:
        """Finished slices go to the ranks that keep the sums."""
        each = self.plan.finished_bytes(ops[0])
        for index, op in enumerate(ops):
            assert isinstance(op, Reduce | ReduceGradient)
            for members, size in _spans(slices, index):
                self.sent[members.start : members.stop] += size * each * len(op.to)
                for keeper in _both(op.to, members):
                    self.sent[keeper] -= size * each
                    self.received[keeper] -= size * each
            self.receive(op.to, slices.lengths[index] * each)

    def spread(self, ops: Sequence[Op], slices: Slices, groups: Groups, row: Row) -> None:
        """Slices go from the sources to the members of their groups."""
        for index, op in enumerate(ops):
            source = self.plan.sources(op)[0]  # of the first group; others have it at its place
            place = groups.members.index(source) if source in groups.members else None
            for places, size in _spans(slices, index):
                each = self.plan.wire_bytes(op, size)
                row.received[places.start : places.stop] += each
                if place is None:
                    self.sent[source] += each * len(places)
                else:
                    own = place in places
                    row.sent[place] += each * (len(places) - own)
                    row.received[place] -= each * own

    def add_row(self, groups: Groups, row: Row) -> None:
        for target, numbers in ((self.sent, row.sent), (self.received, row.received)):
            target[places(groups.members)] += np.tile(numbers, groups.count)


@lru_cache(maxsize=256)
def _parts(piece: Piece) -> Numbers:
    """Numbers that each holder of a piece in chunks has."""
    assert piece.chunk is not None
    (start, stop), *_ = piece.box
    first = start // piece.chunk + np.arange(len(piece.holders), dtype=np.int64)
    rows = np.minimum(stop, (first + 1) * piece.chunk) - np.maximum(start, first * piece.chunk)
    return rows * piece.row_numel


def _spans(slices: Slices, payload: int) -> Iterator[tuple[range, int]]:
    """The members that have something of a payload, in runs of those that have equally much."""
    span = slices.span(payload)
    if not span:
        return
    ends = [slices.overlap(payload, member).numel for member in (span[0], span[-1])]
    yield span[:1], ends[0]
    if len(span) > 1:
        if len(span) > 2:
            yield span[1:-1], slices.each
        yield span[-1:], ends[1]


def _both(one: Ranks, other: range) -> Iterable[int]:
    few, many = sorted((one, other), key=len)
    return (rank for rank in few if rank in many)


def places(ranks: Ranks) -> slice | list[int]:
    """What picks the numbers of some ranks out of an array by rank.

    Arguments:
        ranks: whose numbers are meant.
    """
    return slice(ranks.start, ranks.stop, ranks.step) if isinstance(ranks, range) else list(ranks)


def add(target: Numbers | Costs, ranks: Ranks, amount: float) -> None:
    """Add an amount to those of some ranks, in place.

    Arguments:
        target: of rank 0, 1, ….
        ranks: whose amounts grow.
        amount: by how much.
    """
    target[places(ranks)] += amount
