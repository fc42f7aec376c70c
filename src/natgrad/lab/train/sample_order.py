"""Which samples a step reads, ``row = order(epoch)[p mod N]`` at place ``p = step · batch + i``,
and what is drawn at random for them.

All of it depends on the seed and the step alone, and neither on processes nor on micro-batches nor
on where a run was interrupted: nothing of it has to be saved but the number of steps.
"""

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, tee
from typing import Any

import numpy as np
import torch

from natgrad.errors import DataError
from natgrad.lab.data import prefetch, random_numbers
from natgrad.lab.data.dataset import Rows
from natgrad.lab.train.interruption import SIGNALS


@dataclass(frozen=True)
class Micro:
    """A part of a step that one process takes at once: the samples at ``first`` to ``last`` of the
    step's batch."""

    step: int
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    @property
    def places(self) -> slice:
        return slice(self.first, self.last)


@dataclass(frozen=True)
class Cut:
    """How a batch is cut: equal shares of the ranks, each into micro-batches of nearly one size."""

    batch: int
    rank: int
    ranks: int
    at_once: int  # samples

    def micros(self, step: int) -> list[Micro]:
        share = self.batch // self.ranks
        count = -(-share // self.at_once)
        edges = [self.rank * share + share * i // count for i in range(count + 1)]
        return [Micro(step, first, last) for first, last in pairwise(edges)]


class Stream:
    """Batches of training data by `Micro`."""

    def __init__(self, rows: Rows, batch: int, seed: int) -> None:
        self.rows, self.batch, self.seed = rows, batch, seed
        if not len(rows):
            raise DataError("There are no training data: name others.")

    def batch_of(self, micro: Micro) -> Any:
        numbers, drawn = self.chosen(micro)
        return self.rows.take(numbers.tolist(), drawn)

    def chosen(self, micro: Micro) -> tuple[np.ndarray, random_numbers.Chances]:
        """Rows ``[n]``, and the random numbers that they take ``[n, chances]``."""
        count = len(self.rows)
        places = micro.step * self.batch + np.arange(micro.first, micro.last)
        epochs = places // count
        found = np.empty(len(places), np.int64)
        drawn = np.empty((len(places), self.rows.chances))
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            here = epochs == epoch
            found[here] = _order(self.seed, epoch, count)[places[here] % count]
            drawn[here] = random_numbers.uniform(self.seed, epoch, found[here], self.rows.chances)
        return found, drawn

    def drawn(self, rows: Rows, numbers: list[int]) -> random_numbers.Chances:
        """Random numbers for test data, the same every time: ``[n, chances]``."""
        return random_numbers.uniform(self.seed, 0, np.array(numbers), rows.chances)

    def read(self, micros: Iterator[Micro], workers: int) -> Iterator[tuple[Micro, Any]]:
        """``workers`` processes read ahead, or none."""
        here, there = tee(micros)
        batches = prefetch.read(self.batch_of, there, workers, seed=self.seed, begin=_leave_signals)
        return zip(here, batches, strict=True)


def generator(seed: int, step: int, purpose: int) -> torch.Generator:
    """Of one step, the same whenever it is asked for."""
    return torch.Generator().manual_seed(number(seed, step, purpose))


def number(*keys: int) -> int:
    """A random one below 2⁶³ that depends on the keys alone."""
    return int(random_numbers.bits(*keys)[0] >> np.uint64(1))


@lru_cache(maxsize=2)  # a batch may begin in one epoch and end in the next
def _order(seed: int, epoch: int, count: int) -> Any:
    return random_numbers.order(seed, epoch, count)


def _leave_signals(worker: int) -> None:
    """Ctrl-C goes to all processes of a terminal, and torchrun's SIGTERM to all of a group; the one
    that trains still needs its batch, and then ends the others."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
