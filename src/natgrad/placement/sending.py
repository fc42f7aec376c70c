"""How many bytes every rank sends for the ops of a plan, by clock."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from natgrad.placement.amounts import Agreement, Sent, agreement_of
from natgrad.placement.collectives import Flows
from natgrad.placement.ops import Op, TotalGradients
from natgrad.placement.travel import Travel


class Sending(Travel):
    """The part of a `Plan` that adds up what is sent."""

    def all_reduced(self, other_numbers: int = 0) -> int:
        """Bytes of gradients in the all-reduce of every step; 0 unless gradients are local.

        Arguments:
            other_numbers: how many numbers are in the gradients of parameters without a block,
                which are summed as well where gradients are local.
        """
        if not self.world.gradients_are_local or self.world_size == 1:
            return 0
        numbers = sum(self.numbers(op) for op in self.apply if isinstance(op, TotalGradients))
        return (numbers + other_numbers) * self.world.total_bytes

    def sent(self, rank: int, other_numbers: int = 0) -> Sent:
        """Bytes that a rank sends at an update, at a refresh of all factors, and at every step.

        Arguments:
            rank: from 0 to ``world_size - 1``.
            other_numbers: how many numbers are in the gradients of parameters without a block.
        """
        reduced = 2 * (self.world_size - 1) * self.all_reduced(other_numbers) / self.world_size
        update, refresh, apply = (int(flow.sent[rank]) for flow in self._flows)
        if other_numbers not in self._agreements:
            self._agreements[other_numbers] = agreement_of(self, other_numbers)
        return Sent(update, refresh, apply + reduced, self._agreements[other_numbers])

    @cached_property
    def _agreements(self) -> dict[int, Agreement]:
        """The same for every rank."""
        return {}

    def average_sent(self, other_numbers: int = 0) -> float:
        """Bytes of an average step, of the rank that sends most.

        Arguments:
            other_numbers: how many numbers are in the gradients of parameters without a block.
        """
        often = (self.world.update_every, self.world.refresh_every, 1)
        sent = sum(flow.sent / every for flow, every in zip(self._flows, often, strict=True))
        first = self.sent(0, other_numbers)
        fixed = first.gradients - int(self._flows[-1].sent[0]) + first.agreement.apply
        fixed += first.agreement.update / often[0] + first.agreement.refresh / often[1]
        return float(np.max(sent)) + fixed

    def remember(self, counted: Sequence[Flows]) -> None:
        """Keep the bytes of the three clocks, which somebody has counted.

        Arguments:
            counted: of an update, of a refresh and of every step.
        """
        self.__dict__["_flows"] = tuple(counted)

    @cached_property
    def _flows(self) -> tuple[Flows, ...]:
        return tuple(self.flows(ops) for ops in self._clocks)

    @property
    def _clocks(self) -> tuple[Sequence[Op], ...]:
        return self.update, self.refresh, self.apply
