"""Ranks as threads of one process, and a communicator of them that misbehaves where it is told to.

Messages lie in a post office, by the number of the collective and the rank that sent them. A rank
that waits longer than `PATIENCE` for one gives up, as a backend does.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.comm import Communicator
from natgrad.comm.transfers import Pending

PATIENCE = 2.0  # seconds
LIMIT = (
    120.0  # after which a rank hangs; the first step imports much, on a machine that may be busy
)
KINDS = ("delayed", "dropped", "duplicated", "truncated", "damaged")


@dataclass(frozen=True)
class Fault:
    """What happens to the message that ``rank`` sends in its collective number ``call``."""

    kind: str
    rank: int
    call: int


class PostOffice:
    def __init__(self, ranks: int, fault: Fault | None = None) -> None:
        self.ranks, self.fault = ranks, fault
        self.patience = LIMIT if fault is None else PATIENCE
        self.letters: dict[tuple[int, int], Any] = {}
        self.news = threading.Condition()
        self.closed = False
        self.harmed = False  # whether the fault found a message that it could harm

    def post(self, rank: int, call: int, letter: Any) -> None:
        fault = self.fault
        copies = [letter]
        if fault is not None and (fault.rank, fault.call) == (rank, call):
            self.harmed = True
            if fault.kind == "delayed":
                time.sleep(0.05)
            elif fault.kind == "dropped":
                return
            elif fault.kind == "duplicated":
                copies = [letter, letter]
            elif fault.kind == "truncated":
                copies = [shortened(letter)]
                self.harmed = copies[0] is not letter
            elif fault.kind == "damaged":
                copies = [spoilt(letter)]
                self.harmed = copies[0] is not letter
        with self.news:
            for one in copies:
                # One that comes twice is taken for the next one of its sender.
                while (call, rank) in self.letters:
                    call += 1
                self.letters[call, rank] = one
            self.news.notify_all()

    def collect(self, call: int) -> list[Any]:
        """The letters of all ranks."""
        wanted = [(call, rank) for rank in range(self.ranks)]
        with self.news:
            arrived = self.news.wait_for(
                lambda: self.closed or all(one in self.letters for one in wanted), self.patience
            )
            if self.closed or not arrived:
                raise TimeoutError("a rank did not answer in time")
            return [self.letters[one] for one in wanted]

    def close(self) -> None:
        """A rank has ended: the others learn of it, as from a broken connection."""
        with self.news:
            self.closed = True
            self.news.notify_all()


def shortened(letter: Any) -> Any:
    """Without the last number of the first piece that has one."""
    if isinstance(letter, Tensor):
        return letter[:-1]
    if isinstance(letter, list):
        at = next((i for i, t in enumerate(letter) if len(t)), None)
        if at is not None:
            return [t[:-1] if i == at else t for i, t in enumerate(letter)]
    return letter


def spoilt(letter: Any) -> Any:
    """A number in it is none."""
    if isinstance(letter, Tensor) and letter.is_floating_point() and len(letter):
        letter = letter.clone()
        letter[0] = float("nan")
    elif isinstance(letter, list):
        found = [spoilt(t) for t in letter]
        return found if any(a is not b for a, b in zip(found, letter, strict=True)) else letter
    return letter


class Arriving:
    def __init__(self, comm: "ThreadRank", call: int, then: Callable[[list[Any]], Tensor]) -> None:
        self.comm, self.call, self.then = comm, call, then
        self.result: Tensor | None = None

    def wait(self) -> Tensor:
        if self.result is None:
            self.result = self.comm._carry(
                "receive a message", lambda _: self.then(self.comm.office.collect(self.call))
            )
        return self.result


class ThreadRank(Communicator):
    """One thread."""

    def __init__(self, office: PostOffice, rank: int) -> None:
        super().__init__(rank, office.ranks)
        self.office, self.calls = office, 0

    def _send(self, letter: Any, then: Callable[[list[Any]], Tensor]) -> Pending:
        call, self.calls = self.calls, self.calls + 1
        self.office.post(self.rank, call, letter)
        return Arriving(self, call, then)

    def _exchange(
        self, send: Tensor, sizes: list[int], receive: list[int], failure: str
    ) -> Pending:
        pieces = [piece.clone() for piece in send.split(sizes)]
        return self._send(
            pieces, lambda letters: torch.cat([letter[self.rank] for letter in letters])
        )

    def _total(self, own: Tensor, dtype: torch.dtype, failure: str) -> Pending:
        return self._send(own.clone(), lambda letters: torch.stack(letters).sum(0).to(dtype))

    def _all_gather(self, send: Tensor, failure: str) -> Pending:
        return self._send(send.clone(), torch.cat)

    def _split(self, ranks: list[int]) -> Communicator:
        raise NotImplementedError

    def _gather(self, value: object) -> list[Any]:
        call, self.calls = self.calls, self.calls + 1
        self.office.post(self.rank, call, ("value", value))
        return [letter[1] for letter in self.office.collect(call)]


def together(
    ranks: int, fault: Fault | None, run: Callable[[ThreadRank], Any]
) -> tuple[list[Any], list[int], bool]:
    """What ``run`` returns or raises on each rank, how many collectives each took part in, and
    whether the fault has harmed a message."""
    office = PostOffice(ranks, fault)
    found: list[Any] = [TimeoutError("hangs")] * ranks
    comms = [ThreadRank(office, rank) for rank in range(ranks)]

    def one(rank: int) -> None:
        try:
            found[rank] = run(comms[rank])
        except Exception as error:
            found[rank] = error
            office.close()

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + LIMIT
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return found, [comm.calls for comm in comms], office.harmed
