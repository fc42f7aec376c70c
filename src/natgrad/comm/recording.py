"""A communicator that notes when each message leaves, arrives and is waited for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from natgrad.comm.base import Communicator, Pending, Traffic


@dataclass
class Flight:
    """One message, with times of `time.perf_counter_ns`, which processes of a machine share.

    ``launched`` to ``left`` is the call that sends it, ``waits`` are the calls that wait for it.
    ``arrived`` is when the backend was done; with a backend that does not tell, that is found out
    at the end of the first wait.
    """

    kind: str  # exchange or total
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
class Announced(Protocol):
    """A message that tells when it arrives."""

    def when_arrived(self, call: Callable[[], None]) -> None:
        """Call it once, in whatever thread notices."""
        ...


class Recording(Communicator):
    """Everything goes through ``inner``, which also counts the traffic; ``flights`` has it all in
    the order of departure."""

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner.rank, inner.size)
        self.inner = inner
        self.traffic = inner.traffic
        self.flights: list[Flight] = []

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
        both = (sent, sent if received is None else received)  # a sum goes around in a ring
        flight = Flight(kind, purpose, *both, launched, left)
        self.flights.append(flight)
        return Followed(pending, flight)

    def _exchange(
        self, send: Tensor, sizes: list[int], receive: list[int], failure: str
    ) -> Pending:
        return self.inner._exchange(send, sizes, receive, failure)

    def _total(self, own: Tensor, dtype: torch.dtype, failure: str) -> Pending:
        return self.inner._total(own, dtype, failure)

    def _gather(self, value: object) -> list[Any]:
        return self.inner._gather(value)


class Followed:
    """A message whose arrival and waits are noted."""

    def __init__(self, pending: Pending, flight: Flight) -> None:
        self._pending, self._flight = pending, flight
        if isinstance(pending, Announced):
            pending.when_arrived(flight.arrive)

    def wait(self) -> Tensor:
        begin = perf_counter_ns()
        received = self._pending.wait()
        self._flight.arrive()  # the announcement may come after the wait that it ended
        self._flight.waits.append((begin, perf_counter_ns()))
        return received
