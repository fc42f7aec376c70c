"""Even slices in two levels: inside a node, over its fast links, and then between nodes.

A buffer of n numbers on W = N d ranks, N nodes with d ranks each, rank r = d i + j::

    reduce-scatter   inside    rank j of a node gets the slices of all ranks j        n (d - 1) / d
                     between   of these, rank (i, j) gets its own                  n (N - 1) / (N d)
    all-gather       the other way round

Together a rank sends ``n (W - 1) / W`` as in one level, but only a d-th of it leaves the node, and
the messages are N + d and not N d.
"""

from typing import Any

import torch
from torch import Tensor

from natgrad.comm.base import Communicator
from natgrad.comm.transfers import Pending, Then
from natgrad.comm.wire import Wire
from natgrad.errors import SettingError


class TwoLevels(Communicator):
    """The ranks of another communicator, in nodes.

    Short numbers are added up in float32 inside a node, rounded, and added up so between nodes.

    Arguments:
        inner: all ranks, those of a node one behind the other; it makes everything but
            reduce-scatters and all-gathers.
        node: how many ranks are in each node, a divisor of their number.
    """

    def __init__(self, inner: Communicator, node: int) -> None:
        super().__init__(inner.rank, inner.size)
        if node < 1 or inner.size % node:
            raise SettingError(
                f"TwoLevels.node is {node} but must divide the {inner.size} ranks: give the number "
                "of ranks in each node, the same in all of them."
            )
        self.inner, self.node = inner, node
        self.traffic = inner.traffic
        first = inner.rank - inner.rank % node
        self._inside = inner.split(range(first, first + node))
        self._between = inner.split(range(inner.rank % node, inner.size, node))

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.inner.ranks

    def _reduce_scatter(self, send: Tensor, failure: str) -> Pending:
        # [N, d, n] -> [d, N, n]: what goes to rank j of a node is for the ranks j of all nodes.
        nodes = self.size // self.node
        turned = send.view(nodes, self.node, -1).transpose(0, 1).flatten()

        def between(sums: Tensor) -> Tensor:
            return self._between._reduce_scatter(sums.to(send.dtype), failure).wait()

        return Then(self._inside._reduce_scatter(turned, failure), between)

    def _reduce_packed(self, slices: Tensor, wire: Wire, failure: str) -> Pending:
        nodes, each = self.size // self.node, slices.shape[1]
        turned = slices.view(nodes, self.node, each).transpose(0, 1).flatten(0, 1)

        def between(sums: Tensor) -> Tensor:
            return self._between._reduce_packed(sums.view(nodes, each), wire, failure).wait()

        return Then(self._inside._reduce_packed(turned, wire, failure), between)

    def _all_gather(self, send: Tensor, failure: str) -> Pending:
        nodes = self.size // self.node

        def inside(slices: Tensor) -> Tensor:
            found = self._inside._all_gather(slices, failure).wait()  # [d, N, n]
            return found.view(self.node, nodes, -1).transpose(0, 1).flatten()

        return Then(self._between._all_gather(send, failure), inside)

    def _exchange(
        self, send: Tensor, sizes: list[int], receive: list[int], failure: str
    ) -> Pending:
        return self.inner._exchange(send, sizes, receive, failure)

    def _total(self, own: Tensor, dtype: torch.dtype, failure: str) -> Pending:
        return self.inner._total(own, dtype, failure)

    def _split(self, ranks: list[int]) -> Communicator:
        return self.inner._split(ranks)

    def _gather(self, value: object) -> list[Any]:
        return self.inner._gather(value)
