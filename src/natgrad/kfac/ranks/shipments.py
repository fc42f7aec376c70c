"""What some ops of the plan send directly, as one exchange: an all-to-all with pieces of any size.

Many small messages are one collective, since each collective has a latency. Sizes follow from the
plan, so that no rank has to ask another how much will come.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from natgrad.comm.transfers import CommunicationError, Pending, has_arrived
from natgrad.comm.wire import Wire
from natgrad.kfac.ranks.team import Team
from natgrad.placement.ops import Message, Op


class Addressed(Protocol):
    """What goes from one rank to another."""

    @property
    def source(self) -> int: ...

    @property
    def to(self) -> int: ...

    @property
    def numel(self) -> int: ...


class Parcels(NamedTuple):
    """``wait``: the words that arrive, in the order of messages."""

    pending: Pending
    sizes: list[int]

    def wait(self) -> tuple[Tensor, ...]:
        arrived = self.pending.wait()
        if len(arrived) != sum(self.sizes):
            raise CommunicationError(
                f"{len(arrived)} words have come where {sum(self.sizes)} were to come, so that a "
                "message was changed on its way, or is another one: look at the network, and go on "
                "from the last checkpoint."
            )
        parts: tuple[Tensor, ...] = arrived.split(self.sizes)
        return parts

    def arrived(self) -> bool:
        return has_arrived(self.pending)


# Writes what is sent, the words of each message, in their order.
Fill = Callable[[Sequence[Tensor]], None]


def exchange(
    team: Team,
    outgoing: Sequence[Addressed],
    incoming: Sequence[Addressed],
    fill: Fill,
    wire: Wire,
    purpose: str,
) -> Parcels:
    """One all-to-all of everything that leaves from here, written by ``fill``.

    Words hold numbers of one message only, so that each message has a size of its own.
    ``outgoing`` is sorted by receiver, ``incoming`` by sender, both otherwise in the plan's order.
    """
    sizes, receive = [0] * team.size, [0] * team.size
    for message in outgoing:
        sizes[message.to] += wire.words(message.numel)
    for arrival in incoming:
        receive[arrival.source] += wire.words(arrival.numel)
    buffer = torch.empty(sum(sizes), dtype=wire.dtype, device=team.device)
    fill(buffer.split([wire.words(message.numel) for message in outgoing]))
    pending = team.comm.exchange(buffer, sizes, receive, purpose)
    return Parcels(pending, [wire.words(arrival.numel) for arrival in incoming])


class Shipment:
    """The messages of some ops that this rank sends or receives, in the order of ranks."""

    def __init__(self, team: Team, ops: Iterable[Op]) -> None:
        self.team, ops = team, list(ops)
        self.outgoing = sorted(team.plan.outgoing(ops, team.rank), key=lambda m: m.to)
        self.incoming = sorted(team.plan.incoming(ops, team.rank), key=lambda m: m.source)

    def send(self, fill: Fill, wire: Wire, purpose: str) -> Parcels:
        """Everything that leaves from here, written by ``fill``."""
        return exchange(self.team, self.outgoing, self.incoming, fill, wire, purpose)

    def arrived(self, parcels: Parcels) -> Iterator[tuple[Message, Tensor]]:
        """Everything that came, in words, from rank 0 on."""
        yield from zip(self.incoming, parcels.wait(), strict=True)
