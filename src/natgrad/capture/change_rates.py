"""How much a factor changes from one update to the next (Osawa 2019, eq. 19),

    Diff = |X_t - X_{t-1}|_F / |X_{t-1}|_F

of the *estimates* that single steps give, which is what the paper plots, and of their running
average, which is what is decomposed. The norm is that of the whole matrix, both of its halves. It
takes another copy of every factor, so it is measured where somebody asks for it.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from natgrad.linalg.block_diagonal import BlockDiagonal
from natgrad.linalg.forms import Form

if TYPE_CHECKING:
    from natgrad.capture.averages import NewEstimate
    from natgrad.capture.blocks import Block


@dataclass(frozen=True)
class Change:
    """One update of a factor, compared with the one before.

    Arguments:
        step: of the update, counted from 0.
        estimate: ``Diff`` of the estimate, without memory.
        average: ``Diff`` of the running average.
    """

    step: int
    estimate: float
    average: float


class FactorChanges:
    """The changes of one factor, update by update; the first one has nothing to compare with."""

    def __init__(self, form: Form) -> None:
        self.form = form
        self.found: list[Change] = []
        self._before: Tensor | None = None

    def add(self, step: int, mean: Tensor, weight: Tensor, gap: Tensor, decay: float) -> None:
        """Take in an update, before it is folded.

        Arguments:
            step: of the update.
            mean: ``[numel]``, the running average before it.
            weight: that the past has in it; 0 where it is empty.
            gap: ``[numel]``, ``mean`` minus the new estimate.
            decay: of the running average.
        """
        estimate = mean - gap
        if self._before is not None:
            change = self._relative(estimate - self._before, self._before)
            share = (1 - decay) / (decay * float(weight) + 1 - decay)
            self.found.append(Change(step, change, share * self._relative(gap, mean)))
        self._before = estimate

    def forget(self) -> None:
        """Give the copy back; the next update has nothing to compare with."""
        self._before = None

    def _relative(self, change: Tensor, before: Tensor) -> float:
        size = float(frobenius(self.form, before))
        return float(frobenius(self.form, change)) / size if size else math.inf


class Watcher(Protocol):
    """Is shown every update of a block before it is folded into the running averages."""

    def __call__(self, block: "Block", estimate: "NewEstimate", decay: float) -> None: ...


def frobenius(form: Form, kept: Tensor) -> Tensor:
    """``|X|_F`` of a factor, all of its matrices together; a number.

    Arguments:
        form: how it is kept.
        kept: ``[numel]``, its numbers.
    """
    entries = form.entries(kept)
    parts = entries.sections if isinstance(entries, BlockDiagonal) else (entries,)
    size: Tensor = torch.stack([part.norm() for part in parts]).norm()
    return size
