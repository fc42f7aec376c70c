"""Running mixup and random erasing of a part of a batch, as if it were done to the whole.

What is drawn for a sample depends on the step and on its place in the batch alone, so that any
number of processes and micro-batches do the same together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from natgrad.errors import CheckpointError
from natgrad.lab.schemes import RandomErasing, RunningMixup
from natgrad.lab.train.sample_order import Cut, Micro, generator
from natgrad.lab.train.settings import Settings

ERASING, MIXUP, DROPOUT = 1, 2, 3  # purposes of random numbers


class PlacedErasing(RandomErasing):
    """Draws for ``batch`` samples and takes those at ``places``."""

    def __init__(self, probability: float, batch: int) -> None:
        super().__init__(probability)
        self.batch, self.places = batch, slice(0, batch)

    def rectangles(self, n: int, height: int, width: int) -> np.ndarray:
        return super().rectangles(self.batch, height, width)[:, self.places]


class PlacedMixup(RunningMixup):
    """Draws for ``batch`` samples and takes those at ``places``."""

    def __init__(self, alpha: float, classes: int, batch: int, places: slice) -> None:
        super().__init__(alpha, classes)
        self.batch, self.places = batch, places

    def _shares(self, n: int) -> Tensor:
        return super()._shares(self.batch)[self.places]


@dataclass(frozen=True)
class MixedPiece:
    """What samples at ``first`` to ``last`` of the last batch were mixed to."""

    first: int
    last: int
    inputs: Tensor
    targets: Tensor


class Mixing:
    """``inputs, targets = mixing(micro, inputs, targets)`` for every micro-batch that ``cut`` gives
    in every step. Raw samples are mixed, and the mixed ones erased: no hole comes again."""

    def __init__(self, settings: Settings, classes: int, cut: Cut) -> None:
        self.settings = settings
        self.erasing: PlacedErasing | None = None
        if settings.erasing:
            self.erasing = PlacedErasing(settings.erasing, settings.batch_size)
        self.mixups: dict[tuple[int, int], PlacedMixup] = {}  # by first and last
        if settings.mixup:
            for micro in cut.micros(0):
                self.mixups[micro.first, micro.last] = PlacedMixup(
                    settings.mixup, classes, settings.batch_size, micro.places
                )

    def __call__(self, micro: Micro, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """``[n, c, h, w]``, ``[n]`` -> ``[n, c, h, w]``, ``[n]`` or ``[n, classes]``"""
        seed = self.settings.seed
        if self.mixups:
            mixup = self.mixups[micro.first, micro.last]
            mixup.generator = generator(seed, micro.step, MIXUP)
            inputs, targets = mixup(inputs, targets)
        if self.erasing is not None:
            self.erasing.places = micro.places
            self.erasing.generator = generator(seed, micro.step, ERASING)
            inputs = self.erasing(inputs)
        return inputs, targets

    def state_dict(self) -> list[dict[str, Any]]:
        """This process's share of the last mixed batch."""
        return [
            {"first": first, "last": last, **mixup.state_dict()}
            for (first, last), mixup in self.mixups.items()
        ]

    def load_state_dict(self, shares: Sequence[dict[str, Any]]) -> None:
        """Those of all processes there were, of which this one's part is copied."""
        if not shares:
            return
        pieces = sorted((MixedPiece(**share) for share in shares), key=lambda p: p.first)
        expected = 0
        for piece in pieces:
            if piece.first != expected:
                break
            expected = piece.last
        if expected != self.settings.batch_size:
            raise CheckpointError(
                f"The checkpoint has no mixed samples from {expected} of "
                f"{self.settings.batch_size} on: take one that is complete."
            )
        for place, mixup in self.mixups.items():
            names = ("inputs", "targets")
            mixup.load_state_dict({name: _stitched(pieces, name, *place) for name in names})


def _stitched(pieces: list[MixedPiece], name: str, begin: int, end: int) -> Tensor:
    """``[end - begin, …]``, a copy."""
    parts = []
    for piece in pieces:
        first, last = max(piece.first, begin), min(piece.last, end)
        if first < last:
            parts.append(getattr(piece, name)[first - piece.first : last - piece.first])
    return torch.cat(parts)
