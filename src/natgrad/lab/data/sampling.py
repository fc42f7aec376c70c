"""Who reads which samples when: a pure function of seed, epoch and position.

A step reads the next ``batch · ranks`` samples of the epoch's order, and rank r the r-th share of
them, so all ranks together see what one process with that batch would see.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from natgrad.errors import SettingError
from natgrad.lab.data import random_numbers


@dataclass(frozen=True)
class Sampling:
    """``position`` counts the samples of an epoch that all ranks together have read. It means the
    same for any number of ranks and any batch, so a run may go on with others.

    Without ``drop_last`` every sample is read once in an epoch: the last step may have fewer, as
    evenly spread as possible. Where they would not reach for one a rank, the step before takes
    them, so no rank is ever without a sample.

    Arguments:
        samples: in the data set; at least one for each rank, with ``drop_last`` at least a full
            step.
        batch: samples of a step on each rank, at least 1.
        seed: of the order.
        rank: number of this process, from 0.
        ranks: number of processes.
        shuffle: whether the order differs from epoch to epoch; otherwise it is that of the data.
        drop_last: whether samples that do not fill a step are left out.
    """

    samples: int
    batch: int
    seed: int = 0
    rank: int = 0
    ranks: int = 1
    shuffle: bool = True
    drop_last: bool = False

    def __post_init__(self) -> None:
        for name in ("batch", "ranks"):
            if getattr(self, name) < 1:
                raise SettingError(
                    f"{name} is {getattr(self, name)} but must be at least 1: pass such an int."
                )
        if not 0 <= self.rank < self.ranks:
            raise SettingError(
                f"rank is {self.rank} but must be from 0 to {self.ranks - 1}, as there are "
                f"{self.ranks} ranks: pass the rank of this process."
            )
        least = self.step if self.drop_last else self.ranks
        if self.samples < least:
            why = f"a step of {self.ranks} ranks needs {least}"
            raise SettingError(
                f"The data set has {self.samples} samples but {why}: take a smaller batch, fewer "
                "ranks or more data."
            )

    @property
    def step(self) -> int:
        """Samples of a full step, of all ranks."""
        return self.batch * self.ranks

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """``[samples]``, rows in the order of an epoch.

        Arguments:
            epoch: counted from 0.
        """
        if not self.shuffle:
            return np.arange(self.samples)
        return random_numbers.order(self.seed, epoch, self.samples)

    def end(self, position: int) -> int:
        """Where the step that starts at ``position`` ends; there itself if the epoch is over.

        Arguments:
            position: samples of the epoch that all ranks together have read.
        """
        left = self.samples - position
        if left < (self.step if self.drop_last else self.ranks):
            return position
        if not self.drop_last and left - self.step < self.ranks:
            # The rest would be too few for a further step, unless exactly nothing is left.
            return self.samples
        return position + self.step

    def share(self, position: int, end: int) -> slice:
        """Which samples of a step are this rank's, as a slice of the epoch's order.

        Arguments:
            position: samples of the epoch that all ranks together have read.
            end: where the step ends, as `end` says.
        """
        count = end - position
        first, last = count * self.rank // self.ranks, count * (self.rank + 1) // self.ranks
        return slice(position + first, position + last)

    def cuts(self, position: int = 0) -> list[tuple[int, int]]:
        """Start and end of every step of an epoch from ``position`` on.

        Arguments:
            position: samples of the epoch that all ranks together have read.
        """
        found = []
        while (end := self.end(position)) > position:
            found.append((position, end))
            position = end
        return found
