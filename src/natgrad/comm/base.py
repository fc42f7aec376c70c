"""Collectives as K-FAC needs them: an exchange of pieces between ranks, and a sum over all of them.

With ``x[r → s]`` the piece that rank r has for rank s, and W ranks::

    exchange    rank s receives x[0 → s], x[1 → s], …, x[W-1 → s]     (all-to-all, uneven)
    total       every rank receives Σ_r x[r]                          (all-reduce)

A reduce-scatter is an exchange whose pieces the receiver sums itself: half the bytes of an
all-reduce, in the order of the ranks and in float32 or better whatever the wire's dtype, so that
every rank that keeps a factor has the same bits. Both collectives return at once, and `wait` gives
the result, so that communication overlaps with computation.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from natgrad.errors import NatgradError, SettingError

T = TypeVar("T")

# What `total` sums. 16-bit numbers are sent as float32: added in bfloat16, 256 + 1 is 256.
SUMMED_AS = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.int64: torch.int64,
}


class CommunicationError(NatgradError, RuntimeError):
    """Other ranks could not be reached, or did not answer in time."""


@dataclass
class Traffic:
    """Bytes that this rank sent to others, and calls, both by purpose.

    A sum over W ranks counts as ``2 (W-1)/W`` times its bytes, which is what a ring sends.

    Arguments:
        sent: bytes by purpose, such as ``"factors"``.
        calls: number of collectives by purpose.
    """

    sent: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)

    def count(self, purpose: str, nbytes: float) -> None:
        """Add one collective.

        Arguments:
            purpose: under which the traffic is counted, such as ``"factors"``.
            nbytes: how many bytes this rank sends to others in it.
        """
        self.sent[purpose] = self.sent.get(purpose, 0) + nbytes
        self.calls[purpose] = self.calls.get(purpose, 0) + 1

    def total(self) -> float:
        return sum(self.sent.values())

    def snapshot(self) -> "Traffic":
        """A copy that later messages leave alone."""
        return Traffic(dict(self.sent), dict(self.calls))

    def __sub__(self, earlier: "Traffic") -> "Traffic":
        """What happened since the snapshot ``earlier``; purposes without a call are left out."""
        calls = {name: n - earlier.calls.get(name, 0) for name, n in self.calls.items()}
        calls = {name: n for name, n in calls.items() if n}
        return Traffic({name: self.sent[name] - earlier.sent.get(name, 0) for name in calls}, calls)


class Pending(Protocol):
    """A message that was sent and may not have arrived yet."""

    def wait(self) -> Tensor:
        """The received buffer, flat and contiguous; the same one at every call."""
        ...


class Arrived:
    """A message that did not have to be sent.

    Arguments:
        received: the flat tensor that `wait` returns.
    """

    def __init__(self, received: Tensor) -> None:
        self._received = received

    def wait(self) -> Tensor:
        return self._received


# A backend may still read and write the buffers of a transfer that nobody waits for, so they are
# held here until it is complete.
_in_flight: set["Transfer"] = set()


class Transfer(ABC):
    """A collective in flight; it lives until it is complete, waited for or not.

    Arguments:
        received: flat buffer that the backend writes to.
        dtype: that `wait` converts it to.
        failure: the start of an error sentence, such as ``"Rank 0 of 2 could not exchange
            'factors'"``.
        buffers: all else that the backend uses; kept alive until the message has arrived.
    """

    def __init__(self, received: Tensor, dtype: torch.dtype, failure: str, *buffers: object):
        for message in list(_in_flight):
            if message._arrived():
                _in_flight.discard(message)
        self._received: Tensor | None = received
        self._dtype = dtype
        self._failure = failure
        self._buffers = buffers
        self._waited = False
        self._cause: Exception | None = None
        _in_flight.add(self)

    @abstractmethod
    def _arrived(self) -> bool:
        """Whether the backend is done with the buffers; does not wait and does not raise."""

    @abstractmethod
    def _finish(self) -> None:
        """Wait for the backend, or raise what it raises."""

    def wait(self) -> Tensor:
        if not self._waited:
            self._waited = True
            try:
                self._finish()
            except Exception as error:
                # A later transfer notices when the backend has released the buffers.
                self._cause, self._received = error, None
            else:
                _in_flight.discard(self)
                self._buffers = ()
                if self._received is not None:
                    self._received = self._received.to(self._dtype)
        if self._received is None:
            raise communication_error(self._failure, self._cause) from self._cause
        return self._received


def in_flight() -> int:
    """How many transfers are not known to be complete."""
    return len(_in_flight)


def communication_error(failure: str, cause: BaseException | None) -> CommunicationError:
    """The error that says what failed and why; raise it ``from cause``.

    Arguments:
        failure: the start of its sentence: which rank could not do what.
        cause: the backend's error, of which the first line is quoted.
    """
    reason = str(cause).strip().partition("\n")[0].rstrip(".")
    return CommunicationError(
        f"{failure} ({type(cause).__name__}: {reason}). Another rank has ended, hangs or took "
        "another way through the program: look at what the other ranks say."
    )


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
        if numbers.dtype not in SUMMED_AS:
            allowed = ", ".join(str(dtype) for dtype in SUMMED_AS)
            raise SettingError(
                f"total of '{purpose}': the numbers are {numbers.dtype} but must be one of "
                f"{allowed}: convert them."
            )
        own = numbers.detach().to(SUMMED_AS[numbers.dtype], copy=True)
        self.traffic.count(purpose, 2 * (self.size - 1) * own.nbytes / self.size)
        return self._carry(
            f"add up '{purpose}'", lambda failure: self._total(own, numbers.dtype, failure)
        )

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
