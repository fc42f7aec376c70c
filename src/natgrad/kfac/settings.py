"""Hyperparameters at each step, and the scale that makes one damping mean the same everywhere.

    F = 1/(N T) sum_{n,t} g g^T,    g the gradient of one term's own loss

for N samples with T terms each (tokens, pixels; 1 for a classifier). Backpropagation shows ``g`` if
the loss is a sum and ``g / (N T)`` if it is a mean, so captured gradients are multiplied by
``statistics_scale``; the gradient itself is brought to the mean loss of a term. Damping and KL clip
then carry over between batch sizes, micro-batches, image sizes and window lengths.

If nobody says what the loss is, it is found (`natgrad.kfac.loss_finding`).

At first the loss of a sample was the sum over its terms. The default damping and clip were then T
times too small, and a U-Net with 4,096 labelled pixels hardly moved. docs/scale.md has the whole
convention.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

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


DAMPING, RELATIVE_DAMPING = 0.01, Relative(0.1)


class FoundLoss(NamedTuple):
    """What the loss was in the last step that showed it. ``first``: sum of the weights of its
    terms; ``terms``: how many of the same weight these are like."""

    kind: Literal["mean", "other"]
    first: float
    terms: float
    samples: int

    def of(self, samples: int) -> "FoundLoss":
        """Of as many samples, with as many terms each: a mean has smaller weights then."""
        ratio = samples / self.samples
        first = self.first if self.kind == "mean" else self.first * ratio
        return FoundLoss(self.kind, first, self.terms * ratio, samples)


@dataclass(frozen=True)
class Values:
    """All hyperparameters at one step. ``of_unknown_scale``: neither loss nor damping say how long
    the natural gradient is (`natgrad.kfac.stacks.unknown_scale`)."""

    damping: Damping
    factor_decay: float
    kl_clip: float | None
    norm_damping: float
    momentum: float
    of_unknown_scale: bool = False

    def dampings(self, blocks: Iterable[Block]) -> list[Damping]:
        """The damping of each."""
        return [self.damping_of(block) for block in blocks]

    def damping_of(self, block: Block) -> Damping:
        """Norm layers have a damping of their own (Osawa 2019, sec. 4.2)."""
        own = self.norm_damping if block.normalises else 1.0
        return self.damping if own == 1.0 else self.damping * own


@dataclass
class KFACSettings:
    """``adapted`` is the damping as Levenberg-Marquardt has moved it. ``finds``: nobody has said
    what the loss is; ``found``: what it is, and ``unknown`` that it fits no reading.
    ``keep_scale``: the optimizer goes as far as gradients are long, as SGD does."""

    damping: Damping | Schedule | LevenbergMarquardt | None
    factor_decay: float | Schedule
    kl_clip: float | Schedule | None
    norm_damping: float | Schedule
    momentum: float | Schedule
    loss: MeanLoss | SumLoss
    finds: bool = False
    adapted: float = 0.0
    found: FoundLoss | None = None
    unknown: bool = False
    keep_scale: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.damping, LevenbergMarquardt):
            self.adapted = self.damping.start
        # Numbers are checked here, once; functions of the step at every step.
        for name, allowed in _ALLOWED.items():
            value = getattr(self, name)
            optional = value is None and name in ("damping", "kl_clip")
            if not optional and not isinstance(value, LevenbergMarquardt | Relative):
                value_at(value, 0, name, allowed)

    def at(self, step: int) -> Values:
        found: dict[str, Damping | None] = {}
        for name, allowed in _ALLOWED.items():
            value = getattr(self, name)
            if callable(value):
                found[name] = value_at(value, step, name, allowed)
            elif isinstance(value, LevenbergMarquardt):
                found[name] = self.adapted
            elif value is None and name == "damping":
                relative = self.unknown and not self.keep_scale
                found[name] = RELATIVE_DAMPING if relative else DAMPING
            elif value is None or isinstance(value, Relative):
                found[name] = value
            else:
                found[name] = float(value)
        return Values(**found, of_unknown_scale=self.unscaled)  # type: ignore[arg-type]

    @property
    def unscaled(self) -> bool:
        """Whether nothing says how long a step is: neither the loss nor a damping that is a number,
        with which the KL clip bounds weights as well, ``damping |step|^2 <= kl_clip``."""
        relative = isinstance(self.damping, Relative)
        return self.unknown and self.keep_scale and self.kl_clip is not None and relative

    @property
    def reduction(self) -> Literal["mean", "sum"]:
        """What the loss is over the samples of a step. Of a sum the gradient is not yet that of a
        mean."""
        if self.finds:
            return "sum" if self.found is not None and self.found.kind == "other" else "mean"
        return self.loss.reduction

    @property
    def terms_per_sample(self) -> float:
        """As the user says, or as it was found."""
        if not self.finds or self.found is None:
            return self.loss.terms_per_sample
        return self.found.terms / self.found.samples

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
        if self.finds and self.found is not None:
            return 1.0 if self.reduction == "mean" else 1.0 / self.found.of(samples).first
        return 1.0 if self.reduction == "mean" else 1.0 / (samples * self.loss.terms_per_sample)
