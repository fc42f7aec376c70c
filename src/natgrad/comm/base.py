"""Collectives as K-FAC needs them, of flat tensors, each started at once and waited for later.

With ``x[r → s]`` the piece that rank r has for rank s, and W ranks::

    exchange         rank s receives x[0 → s], x[1 → s], …, x[W-1 → s]    (all-to-all, uneven)
    total            every rank receives Σ_r x[r]                         (all-reduce)
    reduce_scatter   rank s receives Σ_r x[r → s]                         (even slices)
    all_gather       every rank receives x[0], x[1], …, x[W-1]            (even slices)

An exchange costs what its busiest rank sends or receives. The two with even slices cost a rank
``(W - 1) / W`` of the whole buffer whatever it needs, so no rank's traffic grows with W; a backend
does them in its own ring or tree. Numbers of 16 bits are sent as they are and added up in float32:
in bfloat16, 256 + 1 is 256.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from natgrad.comm.transfers import Pending, Then, Traffic, communication_error
from natgrad.comm.wire import SUMMED_AS, Wire
from natgrad.errors import NatgradError, SettingError

T = TypeVar("T")


class Communicator(ABC):
    """One of several ranks that call the same methods in the same order.

    Arguments:
        rank: number of this process among them, from 0.
        size: how many ranks there are.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.traffic = Traffic()

    @property
    def ranks(self) -> tuple[int, ...]:
        """What the launcher calls rank 0, 1, … of this communicator."""
        return tuple(range(self.size))

    def exchange(
        self, send: Tensor, sizes: Sequence[int], receive: Sequence[int], purpose: str
    ) -> Pending:
        """Send every rank its piece, an all-to-all with uneven pieces; `wait` gives the pieces from
        rank 0, 1, … in one buffer. This rank's own piece is copied, and not counted as traffic.

        Arguments:
            send: ``[sum(sizes)]``, contiguous and of any dtype: the pieces for rank 0, 1, … one
                behind the other. Must not be written to before the wait.
            sizes: how many numbers go to each rank; 0 sends it nothing.
            receive: how many numbers each rank sends here; must be what that rank has in its
                ``sizes``.
            purpose: name under which the traffic is counted, such as ``"factors"``.
        """
        sizes, receive = list(sizes), list(receive)
        self._check(send, "exchange", purpose)
        for name, given in (("sizes", sizes), ("receive", receive)):
            if len(given) != self.size or any(n < 0 for n in given):
                raise SettingError(
                    f"exchange of '{purpose}': {name} is {given} but must be {self.size} numbers "
                    "of at least 0, one for each rank."
                )
        if sum(sizes) != send.numel():
            raise SettingError(
                f"exchange of '{purpose}': sizes is {sizes}, {sum(sizes)} numbers in all, but "
                f"send has {send.numel()}: give the size of every rank's piece of it."
            )
        if sizes[self.rank] != receive[self.rank]:
            raise SettingError(
                f"exchange of '{purpose}': rank {self.rank} sends itself {sizes[self.rank]} "
                f"numbers but receives {receive[self.rank]} from itself: give the same number."
            )
        self.traffic.count(purpose, (send.numel() - sizes[self.rank]) * send.element_size())
        return self._carry(
            f"exchange '{purpose}'",
            lambda failure: self._exchange(send.detach(), sizes, receive, failure),
        )

    def total(self, numbers: Tensor, purpose: str) -> Pending:
        """Sum over the ranks (an all-reduce), as a new tensor of the same shape and dtype.

        float16 and bfloat16 are summed, and so also sent and counted, as float32.

        Arguments:
            numbers: ``[n]``, contiguous, of the same length on all ranks; float64, float32,
                bfloat16, float16 or int64.
            purpose: name under which the traffic is counted, such as ``"gradients"``.
        """
        self._check(numbers, "total", purpose)
        _check_summable(numbers, "total", purpose)
        own = numbers.detach().to(SUMMED_AS[numbers.dtype], copy=True)
        self.traffic.count(purpose, 2 * (self.size - 1) * own.nbytes / self.size)
        return self._carry(
            f"add up '{purpose}'", lambda failure: self._total(own, numbers.dtype, failure)
        )

    def reduce_scatter(self, send: Tensor, purpose: str, wire: Wire | None = None) -> Pending:
        """Sum over the ranks, of which this rank gets its slice ``[n]``, as a new tensor: float32
        of 16-bit numbers, which are sent as they are, and otherwise of the dtype of ``send``.

        Arguments:
            send: ``[W n]``, contiguous, of the same length on all ranks: the slices for rank 0, 1,
                … one behind the other. Must not be written to before the wait.
            purpose: name under which the traffic is counted, such as ``"factors"``.
            wire: how numbers become words, where it is not one of them each; every slice is packed
                by itself, and what arrives is unpacked before it is added up.
        """
        self._check(send, "reduce_scatter", purpose)
        _check_summable(send, "reduce_scatter", purpose)
        if send.numel() % self.size:
            raise SettingError(
                f"reduce_scatter of '{purpose}': the {send.numel()} numbers do not make "
                f"{self.size} slices of one length: add zeros at the end."
            )
        what, send = f"reduce '{purpose}'", send.detach()
        if wire is not None and wire.per_word > 1:
            slices = send.view(self.size, send.numel() // self.size)
            packed = wire.words(slices.shape[1]) * wire.dtype.itemsize
            self.traffic.count(purpose, (self.size - 1) * packed)
            return self._carry(what, lambda failure: self._reduce_packed(slices, wire, failure))
        self.traffic.count(purpose, (self.size - 1) * send.nbytes // self.size)
        return self._carry(what, lambda failure: self._reduce_scatter(send, failure))

    def all_gather(self, send: Tensor, purpose: str) -> Pending:
        """The slices of all ranks one behind the other, ``[W n]``, as a new tensor.

        Arguments:
            send: ``[n]``, contiguous, of the same length on all ranks and of any dtype: this rank's
                slice. Must not be written to before the wait.
            purpose: name under which the traffic is counted, such as ``"inverses"``.
        """
        self._check(send, "all_gather", purpose)
        self.traffic.count(purpose, (self.size - 1) * send.nbytes)
        return self._carry(
            f"gather '{purpose}'", lambda failure: self._all_gather(send.detach(), failure)
        )

    def split(self, ranks: Sequence[int]) -> "Communicator":
        """A communicator of some of the ranks, whose traffic is counted here. All ranks must call
        this together, each with the ranks of its own part; the parts must not overlap.

        Arguments:
            ranks: of this communicator, in increasing order, this rank among them; perhaps it
                alone.
        """
        part = list(ranks)
        if self.rank not in part or sorted({*part}) != part or part[-1] >= self.size:
            raise SettingError(
                f"split({part}) was called by rank {self.rank} of {self.size}: give different "
                "ranks in increasing order, with that of the caller."
            )
        made = self._carry(f"make a group of ranks {part}", lambda failure: self._split(part))
        made.traffic = self.traffic
        return made

    def gather(self, value: object) -> list[Any]:
        """Every rank's value, in rank order (an all-gather of objects); it waits for all ranks and
        is not counted as traffic.

        Arguments:
            value: any picklable object; small, as it goes to every rank.
        """
        return self._carry("gather values", lambda failure: self._gather(value))

    @abstractmethod
    def _exchange(
        self, send: Tensor, sizes: list[int], receive: list[int], failure: str
    ) -> Pending: ...

    @abstractmethod
    def _total(self, own: Tensor, dtype: torch.dtype, failure: str) -> Pending:
        """Sum into ``own``, and convert the sum to ``dtype``."""

    def _reduce_scatter(self, send: Tensor, failure: str) -> Pending:
        """By an exchange of slices that each rank adds up itself, which moves no more than a ring
        would; for numbers that a backend adds up less well, or not at all."""
        sizes = [send.numel() // self.size] * self.size
        dtype = SUMMED_AS[send.dtype]
        pending = self._exchange(send, sizes, sizes, failure)
        return Then(pending, lambda got: got.view(self.size, -1).sum(0, dtype=dtype), sends=False)

    def _reduce_packed(self, slices: Tensor, wire: Wire, failure: str) -> Pending:
        """The same of ``slices [k W, n]``, of which each rank gets the sums of ``k``, flat."""
        words, (rows, each) = wire.encode(slices), slices.shape
        sizes = [words.numel() // self.size] * self.size

        def add_up(got: Tensor) -> Tensor:
            numbers = wire.decode(got.view(self.size, rows // self.size, words.shape[1]), each)
            return numbers.sum(0).flatten()

        return Then(self._exchange(words.flatten(), sizes, sizes, failure), add_up)

    @abstractmethod
    def _all_gather(self, send: Tensor, failure: str) -> Pending: ...

    @abstractmethod
    def _split(self, ranks: list[int]) -> "Communicator": ...

    @abstractmethod
    def _gather(self, value: object) -> list[Any]: ...

    def _carry(self, what: str, call: Callable[[str], T]) -> T:
        """What ``call`` returns; what it raises becomes a CommunicationError with rank and what."""
        failure = f"Rank {self.rank} of {self.size} could not {what}"
        try:
            return call(failure)
        except NatgradError:
            raise
        except Exception as error:
            raise communication_error(failure, error) from error

    def _check(self, numbers: Tensor, method: str, purpose: str) -> None:
        # gloo sends a tensor that is not contiguous scrambled, and raises nothing.
        if numbers.ndim != 1 or not numbers.is_contiguous():
            raise SettingError(
                f"{method} of '{purpose}': the numbers have shape {tuple(numbers.shape)} and "
                f"strides {numbers.stride()} but must be flat and contiguous: pass "
                "numbers.contiguous().flatten()."
            )


def _check_summable(numbers: Tensor, method: str, purpose: str) -> None:
    if numbers.dtype not in SUMMED_AS:
        allowed = ", ".join(str(dtype) for dtype in SUMMED_AS)
        raise SettingError(
            f"{method} of '{purpose}': the numbers are {numbers.dtype} but must be one of "
            f"{allowed}: convert them."
        )
