"""Hyperparameters at each step, and the scale that makes one damping mean the same everywhere.

    F = 1/(N T) sum_{n,t} g g^T,    g the gradient of one term's own loss

for N samples with T terms each (tokens, pixels; 1 for a classifier). Backpropagation shows ``g`` if
the loss is a sum and ``g / (N T)`` if it is a mean, so captured gradients are multiplied by
``statistics_scale``; the gradient itself is brought to the mean loss of a term. Damping and KL clip
then carry over between batch sizes, micro-batches, image sizes and window lengths.

At first the loss of a sample was the sum over its terms. The default damping and clip were then T
times too small, and a U-Net with 4,096 labelled pixels hardly moved. docs/scale.md has the whole
convention.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from natgrad.capture.blocks import Block
from natgrad.checks import FRACTION, NOT_NEGATIVE, POSITIVE
from natgrad.damping import Damping, Relative
from natgrad.loss_scale import MeanLoss, SumLoss
from natgrad.schedules import LevenbergMarquardt, Schedule, value_at

_ALLOWED = {
    "damping": NOT_NEGATIVE,
    "factor_decay": FRACTION,
    "kl_clip": POSITIVE,
    "norm_damping": NOT_NEGATIVE,
    "momentum": FRACTION,
}


@dataclass(frozen=True)
class Values:
    """All hyperparameters at one step."""

    damping: Damping
    factor_decay: float
    kl_clip: float | None
    norm_damping: float
    momentum: float

    def dampings(self, blocks: Iterable[Block]) -> list[Damping]:
        """The damping of each."""
        return [self.damping_of(block) for block in blocks]

    def damping_of(self, block: Block) -> Damping:
        """Norm layers have a damping of their own (Osawa 2019, sec. 4.2)."""
        return self.damping * (self.norm_damping if block.normalises else 1.0)


@dataclass
class KFACSettings:
    """``adapted`` is the damping as Levenberg-Marquardt has moved it."""

    damping: Damping | Schedule | LevenbergMarquardt
    factor_decay: float | Schedule
    kl_clip: float | Schedule | None
    norm_damping: float | Schedule
    momentum: float | Schedule
    loss: MeanLoss | SumLoss
    adapted: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.damping, LevenbergMarquardt):
            self.adapted = self.damping.start
        # Numbers are checked here, once; functions of the step at every step.
        for name, allowed in _ALLOWED.items():
            value = getattr(self, name)
            clips_nothing = name == "kl_clip" and value is None
            if not clips_nothing and not isinstance(value, LevenbergMarquardt | Relative):
                value_at(value, 0, name, allowed)

    def at(self, step: int) -> Values:
        found: dict[str, Damping | None] = {}
        for name, allowed in _ALLOWED.items():
            value = getattr(self, name)
            if callable(value):
                found[name] = value_at(value, step, name, allowed)
            elif isinstance(value, LevenbergMarquardt):
                found[name] = self.adapted
            elif value is None or isinstance(value, Relative):
                found[name] = value
            else:
                found[name] = float(value)
        return Values(**found)  # type: ignore[arg-type]

    @property
    def reduction(self) -> Literal["mean", "sum"]:
        """What the loss is over the samples of a step."""
        return self.loss.reduction

    def statistics_scale(self, samples: int, *, observed: bool) -> float:
        """What captured gradients are multiplied by. Their outer products are averaged over N
        samples, but ``F = 1/(N T) Σ g gᵀ`` is a mean over all T terms of each, where ``g`` is of
        one term's own loss: that is how gradients of a sum come, and those that are ``observed``.
        """
        terms = self.loss.terms_per_sample
        own = 1.0 if observed or self.reduction == "sum" else samples * terms
        return own / math.sqrt(terms)

    def gradient_scale(self, samples: int) -> float:
        """What makes the gradient of the loss that of the mean loss of a term."""
        return 1.0 if self.reduction == "mean" else 1.0 / (samples * self.loss.terms_per_sample)
