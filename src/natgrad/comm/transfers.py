"""Collectives under way: what a rank has sent, and what it waits for.

A collective returns at once with a `Pending`, whose `wait` gives the result, so that communication
overlaps with computation. Its buffers belong to the backend until then.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from natgrad.errors import NatgradError


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


@runtime_checkable
class TellsArrival(Protocol):
    """A message that can be asked whether it has arrived."""

    def arrived(self) -> bool:
        """Whether ``wait`` would return at once; does not wait and does not raise."""
        ...


def has_arrived(message: object) -> bool:
    """Whether a message has arrived, as far as it tells.

    Arguments:
        message: any `Pending`; one that does not tell counts as under way.
    """
    return isinstance(message, TellsArrival) and message.arrived()


class Arrived:
    """A message that did not have to be sent.

    Arguments:
        received: the flat tensor that `wait` returns.
    """

    def __init__(self, received: Tensor) -> None:
        self._received = received

    def wait(self) -> Tensor:
        return self._received

    def arrived(self) -> bool:
        return True


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

    def arrived(self) -> bool:
        return self._waited or self._arrived()

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


class Then:
    """A result that is computed from a message, or by a second one, when somebody waits for it.

    Arguments:
        first: the message.
        follow: from what it brought to the result; may send a second message and wait for it, in
            which case all ranks must wait in the same order.
        sends: whether it does so: then nobody knows how long a wait would take.
    """

    def __init__(
        self, first: Pending, follow: Callable[[Tensor], Tensor], *, sends: bool = True
    ) -> None:
        self._first: Pending | None = first
        self._follow, self._sends = follow, sends
        self._result: Tensor | None = None

    def arrived(self) -> bool:
        return self._first is None or (not self._sends and has_arrived(self._first))

    def wait(self) -> Tensor:
        if self._first is not None:
            self._result = self._follow(self._first.wait())
            self._first = None  # what it brought may be many times as large
        assert self._result is not None
        return self._result
