"""Sums of all ranks at the ranks that need them, by either route of the plan.

    direct      every rank's share goes to every rank that keeps the sum, which adds them up in the
                order of ranks
    balanced    a reduce-scatter of the bucket, in which every rank adds up an even slice, and then
                one all-to-all in which finished slices go to the ranks that keep them

A sum is made once, or by all in the same order, so that all ranks that keep it have the same bits.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from natgrad.comm.transfers import Pending
from natgrad.comm.wire import Plain, Wire
from natgrad.kfac.ranks.shipments import Parcels, Shipment, exchange
from natgrad.kfac.ranks.team import Team
from natgrad.placement.ops import Message, Reduce, ReduceGradient
from natgrad.placement.routes import Route
from natgrad.placement.slices import Overlap, Slices

SumOp = Reduce | ReduceGradient
Payload = Callable[[SumOp], Tensor]


@dataclass(frozen=True)
class InFlight:
    """A bucket of ops that was sent, and what this rank contributed to each of them, in words if
    the route is direct."""

    ops: tuple[SumOp, ...]
    shares: Mapping[SumOp, Tensor]
    pending: Pending | Parcels


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
    """``start`` sends a bucket and ``finish`` gives the sums of several; all ranks call both alike.

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

    def start(self, ops: Sequence[SumOp], payload: Payload) -> InFlight:
        """``payload(op) [numbers]``: this rank's share."""
        some = tuple(ops)
        return self._reduce(some, payload) if self._balanced else self._ship(some, payload)

    def finish(self, buckets: Iterable[InFlight]) -> list[dict[SumOp, Tensor]]:
        """The sums that this rank keeps, of each bucket."""
        buckets = list(buckets)
        if not buckets:
            return []
        return self._finish_slices(buckets) if self._balanced else list(map(self._add_up, buckets))

    def share(self, bucket: InFlight, op: SumOp) -> Tensor:
        """The numbers that this rank contributed to a sum."""
        sent = bucket.shares[op]
        return sent if self._balanced else self.wire.decode(sent, self.team.plan.numbers(op))

    @property
    def _balanced(self) -> bool:
        return self.route is Route.BALANCED

    # Message by message.

    def _ship(self, ops: tuple[SumOp, ...], payload: Payload) -> InFlight:
        shares = {op: self.wire.encode(payload(op)) for op in ops}
        if ops not in self._shipments:
            self._shipments[ops] = Shipment(self.team, ops)

        def share(message: Message) -> Tensor:
            assert isinstance(message.op, SumOp)
            return shares[message.op]

        shipment = self._shipments[ops]
        parcels = shipment.send(share, self.wire, self.purpose)
        # What was copied into the buffer is there, and need not be held twice.
        for message, part in zip(shipment.outgoing, parcels.sent, strict=True):
            assert isinstance(message.op, SumOp)
            if self.team.rank not in message.op.to:
                shares[message.op] = part
        return InFlight(ops, shares, parcels)

    def _add_up(self, bucket: InFlight) -> dict[SumOp, Tensor]:
        assert isinstance(bucket.pending, Parcels)
        rank = self.team.rank
        found: dict[SumOp, dict[int, Tensor]] = {
            op: {rank: bucket.shares[op]} for op in bucket.ops if rank in op.to
        }
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

    def _reduce(self, ops: tuple[SumOp, ...], payload: Payload) -> InFlight:
        slices = self._slices(ops)
        buffer = torch.empty(slices.padded, dtype=self.wire.held_as, device=self.team.device)
        views = [buffer[a:b] for a, b in pairwise(slices.starts)]
        for op, view in zip(ops, views, strict=True):
            view.copy_(payload(op))
        buffer[slices.starts[-1] :] = 0
        pending = self.team.comm.reduce_scatter(buffer, self.purpose, self.wire)
        return InFlight(ops, dict(zip(ops, views, strict=True)), pending)

    def _slices(self, ops: Sequence[SumOp]) -> Slices:
        return Slices([self.team.plan.numbers(op) for op in ops], self.team.size)

    def _finish_slices(self, buckets: list[InFlight]) -> list[dict[SumOp, Tensor]]:
        slices = [bucket.pending.wait() for bucket in buckets]
        key = tuple(bucket.ops for bucket in buckets)
        if key not in self._slices_of:
            self._slices_of[key] = self._finished(key)
        cuts, outgoing, incoming, mine = self._slices_of[key]

        def part(message: Finished) -> Tensor:
            at = message.overlap.at
            own = slices[message.bucket]
            assert isinstance(own, Tensor)
            return own[at : at + message.numel]

        sums_wire = Plain(self.wire.summed_as)
        parcels = exchange(self.team, outgoing, incoming, part, sums_wire, self.purpose)
        sums: list[dict[SumOp, Tensor]] = [{} for _ in buckets]
        arrived = [*zip(incoming, parcels.wait(), strict=True), *((m, part(m)) for m in mine)]
        for message, data in arrived:
            op, cut = buckets[message.bucket].ops[message.payload], cuts[message.bucket]
            if op not in sums[message.bucket]:
                sums[message.bucket][op] = data.new_empty(cut.lengths[message.payload])
            sums[message.bucket][op][message.overlap.start : message.overlap.stop] = data
        return sums

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
