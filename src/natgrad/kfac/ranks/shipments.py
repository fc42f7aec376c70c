"""What some ops of the plan send, as one exchange: an all-to-all with pieces of any size.

Many small messages are one collective, since each collective has a latency. Sizes follow from the
plan, so that no rank has to ask another how much will come.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

import torch
from torch import Tensor

from natgrad.comm.base import Pending
from natgrad.kfac.ranks.team import Team
from natgrad.placement.ops import Message, Op


class Shipment:
    """The messages of some ops that this rank sends or receives, in the order of ranks."""

    def __init__(self, team: Team, ops: Iterable[Op]) -> None:
        self.team = team
        mine = [m for m in team.plan.messages(ops) if team.rank in (m.source, m.to)]
        self.outgoing = sorted((m for m in mine if m.source == team.rank), key=lambda m: m.to)
        self.incoming = sorted((m for m in mine if m.to == team.rank), key=lambda m: m.source)
        self.sizes = _sizes(self.outgoing, lambda m: m.to, team.size)
        self.receive = _sizes(self.incoming, lambda m: m.source, team.size)

    def send(
        self, payload: Callable[[Message], Tensor], dtype: torch.dtype, purpose: str
    ) -> Pending:
        """``payload(message) [numel]`` of everything that leaves from here."""
        buffer = torch.empty(sum(self.sizes), dtype=dtype, device=self.team.device)
        parts = buffer.split([m.numel for m in self.outgoing])
        for message, part in zip(self.outgoing, parts, strict=True):
            part.copy_(payload(message))
        return self.team.comm.exchange(buffer, self.sizes, self.receive, purpose)

    def arrived(self, pending: Pending) -> Iterator[tuple[Message, Tensor]]:
        """Everything that came, from rank 0 on."""
        parts = pending.wait().split([m.numel for m in self.incoming])
        yield from zip(self.incoming, parts, strict=True)


def _sizes(messages: list[Message], key: Callable[[Message], int], count: int) -> list[int]:
    sizes = [0] * count
    for rank, group in groupby(messages, key):
        sizes[rank] = sum(m.numel for m in group)
    return sizes
