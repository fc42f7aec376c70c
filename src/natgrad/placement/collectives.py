"""Collectives and the bytes that they move, by rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from natgrad.placement.rank_arrays import Numbers, add
from natgrad.placement.routes import Groups
from natgrad.specs import Ranks


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

    def add(self, calls: Iterable[Collective]) -> None:
        """Add the bytes of collectives, in place.

        Arguments:
            calls: any; those that are one object are added together.
        """
        exchanges: dict[int, tuple[Flows, int]] = {}
        around: dict[Ranks, int] = {}
        for call in calls:
            if call.flows is not None:
                _, times = exchanges.get(id(call), (None, 0))
                exchanges[id(call)] = call.flows, times + 1
            elif call.groups is not None:
                members = call.groups.members
                around[members] = around.get(members, 0) + call.around
        for flows, times in exchanges.values():
            for target, numbers in zip(self, flows, strict=True):
                target[:] += numbers if times == 1 else times * numbers
        for members, size in around.items():
            for target in self:
                add(target, members, size)

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
        sums: whether even slices are added up on the way, by a reduce-scatter.
    """

    flows: Flows | None = None
    groups: Groups | None = None
    around: int = 0
    sums: bool = False

    def of_all(self, ranks: int) -> bool:
        """Whether all ranks begin it together.

        Arguments:
            ranks: how many there are.
        """
        return self.groups is None or self.groups.size == ranks
