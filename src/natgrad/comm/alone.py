"""One process: what is sent arrives at once, and a sum over the ranks is what was given."""

from typing import Any

import torch
from torch import Tensor

from natgrad.comm.base import Communicator
from natgrad.comm.transfers import Arrived, Pending
from natgrad.comm.wire import SUMMED_AS


class Alone(Communicator):
    """The communicator of one process, so that no caller has to ask whether there are others."""

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)
        self.chosen = True  # by the user, and not because there was nobody else

    def _exchange(
        self, send: Tensor, sizes: list[int], receive: list[int], failure: str
    ) -> Pending:
        return Arrived(send.clone())

    def _total(self, own: Tensor, dtype: torch.dtype, failure: str) -> Pending:
        return Arrived(own.to(dtype))

    def _reduce_scatter(self, send: Tensor, failure: str) -> Pending:
        return Arrived(send.to(SUMMED_AS[send.dtype], copy=True))

    def _all_gather(self, send: Tensor, failure: str) -> Pending:
        return Arrived(send.clone())

    def _split(self, ranks: list[int]) -> Communicator:
        return Alone()

    def _gather(self, value: object) -> list[Any]:
        return [value]
