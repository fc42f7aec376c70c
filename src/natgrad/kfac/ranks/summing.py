"""Sums of all ranks at the ranks that need them, by either route of the plan.

    direct      every rank's share goes to every rank that keeps the sum, which adds them up in the
                order of ranks
    balanced    a reduce-scatter of the bucket, in which every rank adds up an even slice, and then
                one all-to-all in which finished slices go to the ranks that keep them

A sum is made once, or by all in the same order, so that all ranks that keep it have the same bits.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from natgrad.comm.transfers import Pending, has_arrived
from natgrad.comm.wire import Plain, Wire
from natgrad.kfac.ranks.shipments import Parcels, Shipment, exchange
from natgrad.kfac.ranks.team import Team
from natgrad.placement.ops import Reduce, ReduceGradient
from natgrad.placement.routes import Route, may_leave
from natgrad.placement.slices import Overlap, Slices

SumOp = Reduce | ReduceGradient
Payload = Callable[[SumOp], Tensor]


@dataclass
class InFlight:
    """A bucket of ops that was sent: first ``pending``; then, once it is settled, either the
    ``sums`` of those ops that this rank keeps, or its ``slice`` of the sum of the bucket.

    ``shares``: what this rank contributed to each op, where that may be needed again; as ``own``,
    in words if the route is direct.
    """

    ops: tuple[SumOp, ...]
    size: int  # bytes of one copy
    shares: dict[SumOp, Tensor]
    own: dict[SumOp, Tensor]  # this rank's shares of what it keeps, to be added up
    pending: Pending | Parcels | None
    sums: dict[SumOp, Tensor] = field(default_factory=dict)
    slice: Tensor | None = None

    @property
    def arrived(self) -> bool:
        return self.pending is None or has_arrived(self.pending)


class Finished(NamedTuple):
    """A slice of a sum on its way to a rank that keeps it."""

    source: int
    to: int
    numel: int
    bucket: int
    payload: int
    overlap: Overlap


class FinishedSlices(NamedTuple):
    """Of some buckets how they are cut, and the slices that leave, that come, and that this rank
    has made itself and keeps."""

    cuts: list[Slices]
    outgoing: list[Finished]
    incoming: list[Finished]
    mine: list[Finished]


class Summing:
    """``start`` sends a bucket, ``settle`` adds up what has come of one, and ``finish`` gives the
    sums of several; all ranks call ``start`` and ``finish`` alike.

    ``wire`` is what shares are on the wire, ``sum_dtype`` that in which they are added up where the
    route is direct; even slices are added up as `Communicator.reduce_scatter` says.
    """

    def __init__(
        self, team: Team, route: Route, wire: Wire, sum_dtype: torch.dtype, purpose: str
    ) -> None:
        self.team, self.route, self.purpose = team, route, purpose
        self.wire, self.sum_dtype = wire, sum_dtype
        self._shipments: dict[tuple[SumOp, ...], Shipment] = {}
        self._slices_of: dict[tuple[tuple[SumOp, ...], ...], FinishedSlices] = {}

    def start(self, ops: Sequence[SumOp], payload: Payload, *, keep: bool = False) -> InFlight:
        """``payload(op) [numbers]``: this rank's share, asked for in the order of ``ops``. Whoever
        may need the shares again says ``keep``."""
        some = tuple(ops)
        return (self._reduce if self._balanced else self._ship)(some, payload, keep)

    def settle(self, bucket: InFlight) -> None:
        """Wait for a bucket, and keep what it adds up to instead of all that has come."""
        if bucket.pending is None:
            return
        if self._balanced:
            found = bucket.pending.wait()
            assert isinstance(found, Tensor)
            bucket.slice = found
        else:
            bucket.sums = self._add_up(bucket)
        bucket.pending, bucket.own = None, {}

    def has_room(self, ops: Sequence[SumOp], buckets: Iterable[InFlight]) -> bool:
        """Whether a bucket may leave while those of ``buckets`` are under way that have not come;
        those that have are settled, in their order."""
        under_way = [bucket for bucket in buckets if bucket.pending is not None]
        while under_way and under_way[0].arrived:
            self.settle(under_way.pop(0))
        return may_leave(self._size(ops), [bucket.size for bucket in under_way])

    def make_room(self, ops: Sequence[SumOp], buckets: Iterable[InFlight]) -> None:
        """Wait until a bucket may leave. All ranks must have sent what is waited for, or be about
        to, whatever this rank does."""
        under_way = [bucket for bucket in buckets if bucket.pending is not None]
        while not may_leave(self._size(ops), [bucket.size for bucket in under_way]):
            self.settle(under_way.pop(0))

    def _size(self, ops: Sequence[SumOp]) -> int:
        words = sum(self.wire.words(self.team.plan.numbers(op)) for op in ops)
        return words * self.wire.dtype.itemsize

    def finish(self, buckets: list[InFlight]) -> Iterator[tuple[SumOp, Tensor]]:
        """The sums that this rank keeps, bucket by bucket. ``buckets`` are used up, so that no sum
        is there twice."""
        if not buckets:
            return
        if self._balanced:
            yield from self._finish_slices(buckets)
            return
        while buckets:
            bucket = buckets.pop(0)
            self.settle(bucket)
            while bucket.sums:
                op = next(iter(bucket.sums))
                yield op, bucket.sums.pop(op)

    def share(self, bucket: InFlight, op: SumOp) -> Tensor:
        """The numbers that this rank contributed to a sum."""
        sent = bucket.shares[op]
        return sent if self._balanced else self.wire.decode(sent, self.team.plan.numbers(op))

    @property
    def _balanced(self) -> bool:
        return self.route is Route.BALANCED

    # Message by message.

    def _ship(self, ops: tuple[SumOp, ...], payload: Payload, keep: bool) -> InFlight:
        if ops not in self._shipments:
            self._shipments[ops] = Shipment(self.team, ops)
        shipment = self._shipments[ops]
        own: dict[SumOp, Tensor] = {}
        shares: dict[SumOp, Tensor] = {}

        def fill(parts: Sequence[Tensor]) -> None:
            """Share after share, so that none is held beside the buffer for long."""
            places: dict[SumOp, list[Tensor]] = {op: [] for op in ops}
            for message, part in zip(shipment.outgoing, parts, strict=True):
                assert isinstance(message.op, SumOp)
                places[message.op].append(part)
            for op in ops:
                share = self.wire.encode(payload(op))
                for part in places[op]:
                    part.copy_(share)
                if self.team.rank in op.to:
                    own[op] = share
                if keep:
                    shares[op] = share if op in own else places[op][0]
                del share

        parcels = shipment.send(fill, self.wire, self.purpose)
        return InFlight(ops, self._size(ops), shares, own, parcels)

    def _add_up(self, bucket: InFlight) -> dict[SumOp, Tensor]:
        assert isinstance(bucket.pending, Parcels)
        rank = self.team.rank
        found = {op: {rank: share} for op, share in bucket.own.items()}
        for message, data in self._shipments[bucket.ops].arrived(bucket.pending):
            assert isinstance(message.op, SumOp)
            found[message.op][message.source] = data
        sums = {}
        for op, by_rank in found.items():
            numbers = self.team.plan.numbers(op)
            total = torch.zeros(numbers, dtype=self.sum_dtype, device=self.team.device)
            for source in sorted(by_rank):
                total += self.wire.decode(by_rank[source], numbers)
            sums[op] = total
        return sums

    # In even slices.

    def _reduce(self, ops: tuple[SumOp, ...], payload: Payload, keep: bool) -> InFlight:
        slices = self._slices(ops)
        buffer = torch.empty(slices.padded, dtype=self.wire.held_as, device=self.team.device)
        views = [buffer[a:b] for a, b in pairwise(slices.starts)]
        for op, view in zip(ops, views, strict=True):
            view.copy_(payload(op))
        buffer[slices.starts[-1] :] = 0
        pending = self.team.comm.reduce_scatter(buffer, self.purpose, self.wire)
        shares = dict(zip(ops, views, strict=True)) if keep else {}
        return InFlight(ops, self._size(ops), shares, {}, pending)

    def _slices(self, ops: Sequence[SumOp]) -> Slices:
        return Slices([self.team.plan.numbers(op) for op in ops], self.team.size)

    def _finish_slices(self, buckets: list[InFlight]) -> Iterator[tuple[SumOp, Tensor]]:
        for one in buckets:
            self.settle(one)
        key = tuple(bucket.ops for bucket in buckets)
        slices = [bucket.slice for bucket in buckets]
        del one
        buckets.clear()
        if key not in self._slices_of:
            self._slices_of[key] = self._finished(key)
        cuts, outgoing, incoming, mine = self._slices_of[key]

        def part(message: Finished) -> Tensor:
            own = slices[message.bucket]
            assert own is not None
            return own[message.overlap.at : message.overlap.at + message.numel]

        def fill(parts: Sequence[Tensor]) -> None:
            for message, into in zip(outgoing, parts, strict=True):
                into.copy_(part(message))

        sums_wire = Plain(self.wire.summed_as)
        parcels = exchange(self.team, outgoing, incoming, fill, sums_wire, self.purpose)
        pieces: dict[tuple[int, int], list[tuple[Overlap, Tensor]]] = {}
        arrived = [*zip(incoming, parcels.wait(), strict=True), *((m, part(m)) for m in mine)]
        for message, data in arrived:
            here = pieces.setdefault((message.bucket, message.payload), [])
            here.append((message.overlap, data))
        for (bucket, payload), found in sorted(pieces.items(), key=lambda item: item[0]):
            total = found[0][1].new_empty(cuts[bucket].lengths[payload])
            for overlap, data in found:
                total[overlap.start : overlap.stop] = data
            yield key[bucket][payload], total
            del total

    def _finished(self, buckets: tuple[tuple[SumOp, ...], ...]) -> FinishedSlices:
        rank = self.team.rank
        cuts = [self._slices(ops) for ops in buckets]
        outgoing: list[Finished] = []
        incoming: list[Finished] = []
        mine: list[Finished] = []
        for index, (ops, cut) in enumerate(zip(buckets, cuts, strict=True)):
            for payload, overlap in cut.of_member(rank):
                make = partial(Finished, numel=overlap.numel, bucket=index, payload=payload)
                for keeper in ops[payload].to:
                    (mine if keeper == rank else outgoing).append(
                        make(source=rank, to=keeper, overlap=overlap)
                    )
            for payload, op in enumerate(ops):
                if rank in op.to:
                    for member in cut.span(payload):
                        if member != rank:
                            overlap = cut.overlap(payload, member)
                            incoming.append(
                                Finished(member, rank, overlap.numel, index, payload, overlap)
                            )
        outgoing.sort(key=lambda m: m.to)
        incoming.sort(key=lambda m: m.source)
        return FinishedSlices(cuts, outgoing, incoming, mine)
