"""A data set that is read by batches of rows, with random numbers that come from outside."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.utils.data import Dataset

from natgrad.errors import SettingError
from natgrad.lab.data.random_numbers import Chances

T = TypeVar("T")
IGNORED = -100  # a target that does not count, in torch's cross-entropy as well


class Rows(Dataset[Any], ABC):
    """What `natgrad.lab.data.loader` reads; for torch's own `DataLoader` it is a map-style data
    set, which then draws from torch's global random numbers."""

    chances: int = 0  # random numbers that a sample takes

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def take(self, rows: Sequence[int], chances: Chances) -> tuple[Any, Any]:
        """A batch ``(inputs, targets)`` of some samples.

        Arguments:
            rows: numbers of ``n`` samples, from 0.
            chances: ``[n, self.chances]``, uniform in [0, 1): all that is random in the batch.
        """

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        drawn = torch.rand(1, self.chances, dtype=torch.float64).numpy()
        inputs, targets = self.take([row % len(self)], drawn)
        return inputs[0], targets[0]

    def part(self, rows: Sequence[int] | range) -> "Part":
        """Some of the samples, in this order.

        Arguments:
            rows: numbers of the samples, from 0; others raise.
        """
        return Part(self, rows)


class Part(Rows):
    """Some rows of another data set.

    Arguments:
        whole: the data set.
        rows: numbers of its samples that are in the part, in this order.
    """

    def __init__(self, whole: Rows, rows: Sequence[int] | range) -> None:
        for row in rows:
            if not 0 <= row < len(whole):
                raise SettingError(
                    f"A part has row {row} but the whole has {len(whole)} of them: give rows from "
                    f"0 to {len(whole) - 1}."
                )
        self.whole, self.rows = whole, tuple(rows)
        self.chances = whole.chances

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, rows: Sequence[int], chances: Chances) -> tuple[Any, Any]:
        return self.whole.take([self.rows[row] for row in rows], chances)


class Split(NamedTuple, Generic[T]):
    """Training and test data.

    Arguments:
        train: what to learn from.
        test: what to judge by.
    """

    train: T
    test: T
