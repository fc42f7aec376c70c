"""A communicator that notes when each message leaves, arrives and is waited for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from natgrad.comm.base import Communicator
from natgrad.comm.transfers import Pending, Traffic, has_arrived
from natgrad.comm.wire import Wire


@dataclass
class MessageTimes:
    """One message, with times in nanoseconds by `time.perf_counter_ns`, which the processes of a
    machine share.

    Arguments:
        kind: the method of the communicator, such as ``"exchange"``.
        purpose: under which the traffic is counted, such as ``"factors"``.
        sent: bytes to other ranks, as `Traffic` counts them.
        received: bytes from other ranks; of all but exchanges as many as were sent.
        launched: when the call that sends it began.
        left: when that call returned.
        arrived: when the backend was done, or, if it does not tell, the end of the first wait;
            ``None`` until then.
        waits: begin and end of every call of `wait`.
    """

    kind: str
    purpose: str
    sent: float  # bytes to other ranks, as traffic counts them
    received: float
    launched: int
    left: int
    arrived: int | None = None
    waits: list[tuple[int, int]] = field(default_factory=list)

    def arrive(self) -> None:
        if self.arrived is None:
            self.arrived = perf_counter_ns()


@runtime_checkable
class AnnouncesArrival(Protocol):
    """A message that tells when it arrives."""

    def when_arrived(self, call: Callable[[], None]) -> None:
        """Call it once, in whatever thread notices.

        Arguments:
            call: a function without arguments.
        """
        ...


class Recording(Communicator):
    """A communicator that passes everything on and keeps ``messages``, all messages in the order of
    departure.

    Arguments:
        inner: the communicator that does the work and counts the traffic.
    """

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner.rank, inner.size)
        self.inner = inner
        self.traffic = inner.traffic
        self.messages: list[MessageTimes] = []

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.inner.ranks

    def exchange(
        self, send: Tensor, sizes: Sequence[int], receive: Sequence[int], purpose: str
    ) -> Pending:
        before, launched = self.traffic.snapshot(), perf_counter_ns()
        pending = self.inner.exchange(send, sizes, receive, purpose)
        received = (sum(receive) - receive[self.rank]) * send.element_size()
        return self._follow(pending, "exchange", purpose, before, launched, received)

    def total(self, numbers: Tensor, purpose: str) -> Pending:
        before, launched = self.traffic.snapshot(), perf_counter_ns()
        pending = self.inner.total(numbers, purpose)
        return self._follow(pending, "total", purpose, before, launched)

    def reduce_scatter(self, send: Tensor, purpose: str, wire: Wire | None = None) -> Pending:
        before, launched = self.traffic.snapshot(), perf_counter_ns()
        pending = self.inner.reduce_scatter(send, purpose, wire)
        return self._follow(pending, "reduce_scatter", purpose, before, launched)

    def all_gather(self, send: Tensor, purpose: str) -> Pending:
        before, launched = self.traffic.snapshot(), perf_counter_ns()
        pending = self.inner.all_gather(send, purpose)
        return self._follow(pending, "all_gather", purpose, before, launched)

    def split(self, ranks: Sequence[int]) -> Communicator:
        part = Recording(self.inner.split(ranks))
        part.messages = self.messages
        return part

    def _follow(
        self,
        pending: Pending,
        kind: str,
        purpose: str,
        before: Traffic,
        launched: int,
        received: int | None = None,
    ) -> Pending:
        left = perf_counter_ns()
        sent = (self.traffic - before).sent[purpose]
        both = (sent, sent if received is None else received)  # a ring passes on what it gets
        message = MessageTimes(kind, purpose, *both, launched, left)
        self.messages.append(message)
        return TimedPending(pending, message)

    def _exchange(
        self, send: Tensor, sizes: list[int], receive: list[int], failure: str
    ) -> Pending:
        return self.inner._exchange(send, sizes, receive, failure)

    def _total(self, own: Tensor, dtype: torch.dtype, failure: str) -> Pending:
        return self.inner._total(own, dtype, failure)

    def _all_gather(self, send: Tensor, failure: str) -> Pending:
        return self.inner._all_gather(send, failure)

    def _split(self, ranks: list[int]) -> Communicator:
        return self.inner._split(ranks)

    def _gather(self, value: object) -> list[Any]:
        return self.inner._gather(value)


class TimedPending:
    """A message whose arrival and waits are noted.

    Arguments:
        pending: the message itself.
        message: where its times are noted.
    """

    def __init__(self, pending: Pending, message: MessageTimes) -> None:
        self._pending, self._times = pending, message
        if isinstance(pending, AnnouncesArrival):
            pending.when_arrived(message.arrive)

    def arrived(self) -> bool:
        return has_arrived(self._pending)

    def wait(self) -> Tensor:
        begin = perf_counter_ns()
        received = self._pending.wait()
        self._times.arrive()  # the announcement may come after the wait that it ended
        self._times.waits.append((begin, perf_counter_ns()))
        return received
