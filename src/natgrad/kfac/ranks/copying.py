"""What one rank has and many need, by either route of the plan.

    direct      the rank that has it sends every other rank its own copy
    balanced    it sends every member of the group that needs it an even slice, in one all-to-all
                with those of all others, and then each group gathers the slices of a bucket

The groups are rows and columns of the grid of ranks, or all of them. Each is a process group of its
own, made once by all ranks together, in the order of the plan.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from natgrad.comm.base import Communicator
from natgrad.comm.wire import Wire
from natgrad.kfac.ranks.shipments import Shipment, exchange
from natgrad.kfac.ranks.team import Team
from natgrad.placement.ops import Gather, Op, Return, Share
from natgrad.placement.routes import Groups
from natgrad.placement.slices import Overlap, Slices
from natgrad.specs import Ranks, server

CopyOp = Share | Return | Gather


class Arrival(NamedTuple):
    """What came for an op: ``data [numbers]`` from a rank, with the KL clip's number at the end if
    ``clip``."""

    op: Op
    source: int
    clip: bool
    data: Tensor


class Slice(NamedTuple):
    """A slice of an op's numbers on its way to a member of a group."""

    source: int
    to: int
    numel: int
    bucket: int
    payload: int
    overlap: Overlap


class Bucket(NamedTuple):
    """Ops whose copies the same group needs, and how they are cut."""

    groups: Groups
    members: Ranks  # of this rank's group, or of the group that it sends slices to
    ops: tuple[CopyOp, ...]
    slices: Slices


class Spread(NamedTuple):
    """Buckets of copies, and the slices of them that this rank sends and gets."""

    buckets: list[Bucket]
    outgoing: list[Slice]
    incoming: list[Slice]


class Copying:
    """Called with ops of the plan, by all ranks alike. ``payload(op, rank, clip)`` gives what this
    rank has for another one, with the number of the KL clip behind it where that is asked for."""

    def __init__(self, team: Team, ops: Iterable[CopyOp], wire: Wire, purpose: str) -> None:
        self.team, self.wire, self.purpose = team, wire, purpose
        self._shipments: dict[tuple[CopyOp, ...], list[Shipment]] = {}
        self._spreads: dict[tuple[CopyOp, ...], tuple[tuple[CopyOp, ...], Spread]] = {}
        self._comms: dict[Groups, Communicator] = {}
        _, _, copied = team.plan.sorted_by_route(ops)
        for family in _families(copied):
            part, own = team.part(family), next((g for g in family if team.rank in g.members), None)
            if own is not None:
                self._comms[own] = part

    def __call__(
        self, ops: Sequence[CopyOp], payload: Callable[[Op, int, bool], Tensor]
    ) -> Iterator[Arrival]:
        """Everything that came to this rank and that it did not have."""
        some = tuple(ops)
        if some not in self._spreads:
            direct, _, copied = self.team.plan.sorted_by_route(some)
            self._spreads[some] = tuple(direct), self._planned(copied)
        one_by_one, spread = self._spreads[some]
        yield from self._direct(one_by_one, payload)
        if len(one_by_one) < len(some):
            yield from self._spread(spread, payload)

    def _planned(self, copied: dict[Groups, list[CopyOp]]) -> Spread:
        buckets = [
            Bucket(groups, members, bucket, self._slices(bucket, groups))
            for groups, ops in copied.items()
            for members in self._groups_of_interest(groups)
            for bucket in self.team.plan.cut(ops)
        ]
        return Spread(buckets, *self._messages(buckets))

    def _direct(
        self, ops: tuple[CopyOp, ...], payload: Callable[[Op, int, bool], Tensor]
    ) -> Iterator[Arrival]:
        """One exchange for each bucket."""
        if ops not in self._shipments:
            self._shipments[ops] = [Shipment(self.team, some) for some in self.team.plan.cut(ops)]
        for shipment in self._shipments[ops]:  # the buffers of one are gone when the next is made
            yield from self._shipped(shipment, payload)

    def _shipped(
        self, shipment: Shipment, payload: Callable[[Op, int, bool], Tensor]
    ) -> Iterator[Arrival]:
        def fill(parts: Sequence[Tensor]) -> None:
            for message, part in zip(shipment.outgoing, parts, strict=True):
                part.copy_(self.wire.encode(payload(message.op, message.to, message.clip)))

        parcels = shipment.send(fill, self.wire, self.purpose)
        for message, words in shipment.arrived(parcels):
            data = self.wire.decode(words, message.numel)
            yield Arrival(message.op, message.source, message.clip, data)

    def _spread(
        self, spread: Spread, payload: Callable[[Op, int, bool], Tensor]
    ) -> Iterator[Arrival]:
        plan, rank = self.team.plan, self.team.rank
        buckets, outgoing, incoming = spread

        def numbers(bucket: int, index: int) -> Tensor:
            """What this rank has for an op of a bucket."""
            op, members = buckets[bucket].ops[index], buckets[bucket].members
            clip = isinstance(op, Return) and len(plan.clipped[op]) > 0
            to = next(member for member in members if member != rank)
            return payload(op, to, clip)

        def fill(parts: Sequence[Tensor]) -> None:
            """Op after op, so that no two of them are held beside the buffer."""
            of: dict[tuple[int, int], list[tuple[Overlap, Tensor]]] = {}
            for message, part in zip(outgoing, parts, strict=True):
                here = of.setdefault((message.bucket, message.payload), [])
                here.append((message.overlap, part))
            for (bucket, index), slices in of.items():
                whole = numbers(bucket, index)
                for overlap, part in slices:
                    part.copy_(self.wire.encode(whole[overlap.start : overlap.stop]))
                del whole

        parcels = exchange(self.team, outgoing, incoming, fill, self.wire, self.purpose)
        arrived: list[list[tuple[Slice, Tensor]]] = [[] for _ in buckets]
        for message, words in zip(incoming, parcels.wait(), strict=True):
            data = self.wire.decode(words, message.numel)
            arrived[message.bucket].append((message, data))
        for index, bucket in enumerate(buckets):
            if rank in bucket.members:
                yield from self._gather(index, bucket, arrived[index], numbers)

    def _gather(
        self,
        index: int,
        bucket: Bucket,
        arrived: list[tuple[Slice, Tensor]],
        numbers: Callable[[int, int], Tensor],
    ) -> Iterator[Arrival]:
        """An all-gather of the slices of one bucket, among those that need it."""
        plan, rank, slices = self.team.plan, self.team.rank, bucket.slices
        mine = torch.zeros(slices.each, dtype=self.wire.held_as, device=self.team.device)
        for message, data in arrived:
            mine[message.overlap.at : message.overlap.at + message.numel] = data
        for payload, overlap in slices.of_member(bucket.members.index(rank)):
            if self._source(bucket, payload) == rank:
                into = mine[overlap.at : overlap.at + overlap.numel]
                into.copy_(numbers(index, payload)[overlap.start : overlap.stop])
        comm, words = self._comms[bucket.groups], self.wire.encode(mine)
        gathered = comm.all_gather(words, self.purpose).wait().view(comm.size, len(words))
        found = self.wire.decode(gathered, slices.each).flatten()
        for payload, op in enumerate(bucket.ops):
            source = self._source(bucket, payload)
            if source != rank:
                clip = isinstance(op, Return) and len(plan.clipped[op]) > 0
                data = found[slices.starts[payload] : slices.starts[payload + 1]]
                yield Arrival(op, source, clip, data)

    def _slices(self, ops: Sequence[CopyOp], groups: Groups) -> Slices:
        return Slices([self.team.plan.copied_numbers(op) for op in ops], groups.size)

    def _groups_of_interest(self, groups: Groups) -> list[Ranks]:
        """The group that this rank is in, or, where it is in none but has something for one, that
        one. Of several rows each has its sources inside."""
        own = groups.of(self.team.rank)
        if own is not None:
            return [own]
        return [groups.members] if groups.count == 1 else []

    def _source(self, bucket: Bucket, payload: int) -> int:
        """The rank that has what a group needs."""
        op, members = bucket.ops[payload], bucket.members
        if isinstance(op, Return):
            return server(op.sources, members[0], self.team.size)
        assert isinstance(op, Share)
        return op.source

    def _messages(self, buckets: Sequence[Bucket]) -> tuple[list[Slice], list[Slice]]:
        """Slices that this rank sends, and those that it gets."""
        rank = self.team.rank
        outgoing, incoming = [], []
        for index, bucket in enumerate(buckets):
            slices, members = bucket.slices, bucket.members
            for payload in range(len(bucket.ops)):
                source = self._source(bucket, payload)
                if source == rank:
                    for place in slices.span(payload):
                        overlap, to = slices.overlap(payload, place), members[place]
                        if to != rank:
                            outgoing.append(Slice(rank, to, overlap.numel, index, payload, overlap))
                elif rank in members:
                    overlap = slices.overlap(payload, members.index(rank))
                    if overlap.numel:
                        incoming.append(Slice(source, rank, overlap.numel, index, payload, overlap))
        outgoing.sort(key=lambda m: m.to)
        incoming.sort(key=lambda m: m.source)
        return outgoing, incoming


def _families(copied: Iterable[Groups]) -> list[list[Groups]]:
    """Sets of groups that do not overlap, so that a rank is in at most one group of each."""
    families: list[tuple[set[int], list[Groups]]] = []
    for groups in copied:
        apart = (one for one in families if one[0].isdisjoint(groups.members))
        taken, family = next(apart, (set(), []))
        if not family:
            families.append((taken, family))
        taken.update(groups.members)
        family.append(groups)
    return [family for _, family in families]
