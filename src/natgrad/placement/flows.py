"""How many bytes every rank sends and receives for some ops, without listing their messages.

Numbers are kept by rank in arrays, and ops that concern the same ranks are added up first, so that
a plan of ten thousand ranks takes no longer than its ops.

    direct      as `messages` lists them
    balanced    sums      (W - 1) slices of a bucket, and finished slices to the ranks that keep
                copies    slices to the members of a group, and (g - 1) slices among these
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from natgrad.placement.collectives import Collective, Flows
from natgrad.placement.ops import Gather, Op, Reduce, ReduceGradient, Return, Share
from natgrad.placement.rank_arrays import Numbers, add, as_array, common, places, rows_of
from natgrad.placement.routes import Groups, Routes
from natgrad.placement.slices import Slices
from natgrad.specs import Piece, Ranks

if TYPE_CHECKING:
    from natgrad.placement.travel import Travel


def collectives_of(
    plan: Travel, ops: Iterable[Op], routes: Routes | None = None, *, fused: bool = False
) -> list[Collective]:
    """The calls that some ops make, in their order: every bucket of direct ones an all-to-all;
    every bucket of sums a reduce-scatter, and one all-to-all for the finished slices of all; one
    all-to-all for the slices of copies, and an all-gather for every bucket of them. All-to-alls of
    direct buckets that are alike, as those of equal layers on the same ranks, are one object.

    Arguments:
        plan: what the ranks do.
        ops: some of the plan's, in its order; all-reduces are none of these.
        routes: other ones than the plan's own.
        fused: whether all direct ones are one all-to-all instead, however large.
    """
    direct, summed, copied = plan.sorted_by_route(ops, routes)
    found: list[Collective] = []
    known: dict[Hashable, Collective] = {}
    for bucket in [direct] if fused else plan.cut(direct):
        key = tuple(_likeness(plan, op) for op in bucket)
        if key not in known:
            count = _Count(plan)
            for op in bucket:
                count.direct(op)
            known[key] = Collective(count.flows())
        found.append(known[key])
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


def _likeness(plan: Travel, op: Op) -> Hashable:
    """All that the messages of a direct op depend on, but for whose they are."""
    match op:
        case Gather(_, _, to):
            return to, plan.piece(op)
        case Return(_, index, sources, to):
            return sources, to, None if index is None else plan.piece(op), plan.clipped[op]
        case Share(_, source, to):
            return source, to, plan.copy_bytes(op)
        case Reduce(_, to) | ReduceGradient(_, to):
            return to, plan.copy_bytes(op)
        case _:
            return None


def _ring(plan: Travel, ops: Sequence[Op], slices: Slices, groups: Groups) -> Collective:
    """Every member passes on all slices but one."""
    around = (groups.size - 1) * plan.wire_bytes(ops[0], slices.each)
    sums = isinstance(ops[0], Reduce | ReduceGradient)
    return Collective(groups=groups, around=around, sums=sums)


def flows_of(plan: Travel, ops: Iterable[Op]) -> Flows:
    """Bytes of some ops, each by its route.

    Arguments:
        plan: what the ranks do.
        ops: some of the plan's, in its order; all-reduces count nothing here.
    """
    total = Flows.none(plan.world_size)
    total.add(collectives_of(plan, ops, fused=True))  # only the sum of buckets counts
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
        parts = self._bytes_of(piece)
        holders = as_array(piece.holders)
        self.sent[places(piece.holders)] += parts * len(to)
        self.receive(to, int(parts.sum()))
        own = common(piece.holders, to)
        for target in (self.sent, self.received):
            target[holders[own]] -= parts[own]

    def _bytes_of(self, piece: Piece, further: int = 0) -> Numbers:
        """Of what each holder has of a piece in chunks, and some numbers more."""
        world = self.plan.world
        return _part_bytes(piece, further, world.gradient_bytes, world.gradients_per_word)

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
            sizes = (
                self._bytes_of(piece, clips)
                if isinstance(clips, int)
                else plan.wire_bytes(op, _parts(piece) + clips)
            )
            self._return(op.sources, op.to, sizes)
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
            for members, size in _spans(slices, index):
                each = self.plan.wire_bytes(op, size)
                row.received[members.start : members.stop] += each
                if place is None:
                    self.sent[source] += each * len(members)
                else:
                    own = place in members
                    row.sent[place] += each * (len(members) - own)
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


@lru_cache(maxsize=256)
def _part_bytes(piece: Piece, further: int, word: int, each: int) -> Numbers:
    """Bytes of these numbers and some more, in words of several."""
    found: Numbers = -(-(_parts(piece) + further) // each) * word
    return found


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
