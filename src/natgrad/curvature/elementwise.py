"""Losses that sum over the entries of the output, so that ``Λ`` is diagonal.

The square loss ``(f - y)²`` has ``Λ = 2 I``; binary cross-entropy with logits,
``w (r y softplus(-f) + (1 - y) softplus(f))``, has ``Λ = diag(w (1 - y + r y) p (1 - p))``,
``p = sigmoid(f)``.
"""

from abc import abstractmethod
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from natgrad.curvature.likelihoods import Bernoulli, Gaussian, Likelihood
from natgrad.curvature.loss import (
    Loss,
    by_sample,
    check_direction,
    check_weights,
    holds,
    precise,
)
from natgrad.errors import SettingError


class Elementwise(Loss):
    """A mean over all entries of ``output [n, …]``, with a target of the same shape."""

    likelihood: Likelihood

    @abstractmethod
    def _terms(self, f: Tensor, y: Tensor) -> Tensor:
        """Each entry's loss, ``[n, …]``."""

    @abstractmethod
    def _scale(self, f: Tensor, y: Tensor) -> Tensor | None:
        """What the curvature of ``likelihood`` is multiplied by, ``[n, …]``; None for 1."""

    @abstractmethod
    def _diagonal(self, f: Tensor, y: Tensor) -> Tensor:
        """The diagonal of ``Λ``, ``[n, …]``."""

    def total(self, output: Tensor, target: Tensor) -> Tensor:
        return self._terms(*self._checked(output, target)).sum()

    def sample_totals(self, output: Tensor, target: Tensor) -> Tensor:
        return by_sample(self._terms(*self._checked(output, target)))

    def weight(self, output: Tensor, target: Tensor) -> float:
        f, _ = self._checked(output, target)
        return float(f.numel())

    def roots(self, output: Tensor, target: Tensor) -> Iterator[Tensor]:
        """The likelihood's own, for one entry at a time, times the root of the entry's weight."""
        f, y = self._checked(output, target)
        scale = self._scale(f.detach(), y.detach())
        vectors = self.likelihood.exact(f)
        if scale is None:
            return vectors
        root = scale.sqrt()
        return (v * root for v in vectors)

    def passes(self, output: Tensor) -> int:
        return precise(output).shape[1:].numel()

    def stacked_roots(self, output: Tensor, target: Tensor) -> Tensor:
        f, y = self._checked(output, target)
        n, entries = f.shape[0], f.shape[1:].numel()
        root = self._diagonal(f.detach(), y.detach()).sqrt()
        stacked = root.new_zeros(entries, n, entries)
        stacked.diagonal(dim1=0, dim2=2).copy_(root.reshape(n, entries))
        return stacked.reshape(entries, *f.shape)

    def draw(self, output: Tensor, target: Tensor, generator: torch.Generator) -> Tensor:
        f, y = self._checked(output, target)
        v = self.likelihood.sample(f, generator)
        scale = self._scale(f.detach(), y.detach())
        return v if scale is None else v * scale.sqrt()

    def curve(self, output: Tensor, target: Tensor, u: Tensor) -> Tensor:
        f, y = self._checked(output, target)
        check_direction(output, u)
        return self._diagonal(f.detach(), y.detach()) * u

    def _checked(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        f = precise(output)
        if target.is_complex():
            raise SettingError(
                f"{type(self).__name__} got {target.dtype} targets but needs real numbers: pass "
                "real and imaginary parts as two outputs."
            )
        # Broadcasting [n] against [n, 1] would compare each sample with all the others' targets.
        if target.shape != f.shape:
            raise SettingError(
                f"{type(self).__name__} got targets of shape {list(target.shape)} for an output of "
                f"shape {list(f.shape)}: both must be equal, so reshape one of them."
            )
        return f, target.to(f)


class SquareLoss(Elementwise):
    """``(f - y)²``, as `torch.nn.functional.mse_loss`: a Gaussian of variance 1/2."""

    likelihood = Gaussian(0.5)

    def _terms(self, f: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(f, y, reduction="none")

    def _scale(self, f: Tensor, y: Tensor) -> Tensor | None:
        return None

    def _diagonal(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.full_like(f, 2.0)

    def __repr__(self) -> str:
        return "SquareLoss()"


class BinaryCrossEntropy(Elementwise):
    """Of logits, as `torch.nn.functional.binary_cross_entropy_with_logits`; targets from 0 to 1.

    Neither weight enters what the mean is divided by.

    Arguments:
        pos_weight: multiplies the loss of positive answers; a tensor of weights ``≥ 0`` that
            broadcasts to the output. ``None`` is 1.
        weight: multiplies the loss of each entry; a tensor of weights ``≥ 0`` that broadcasts to
            the output. ``None`` is 1.
    """

    likelihood = Bernoulli()

    def __init__(self, pos_weight: Tensor | None = None, weight: Tensor | None = None) -> None:
        check_weights("BinaryCrossEntropy's pos_weight", pos_weight)
        check_weights("BinaryCrossEntropy's weight", weight)
        self.pos_weight = pos_weight
        self.entry_weight = weight

    def _terms(self, f: Tensor, y: Tensor) -> Tensor:
        positive, entry = self.pos_weight, self.entry_weight
        return F.binary_cross_entropy_with_logits(
            f,
            y,
            weight=None if entry is None else entry.to(f),
            pos_weight=None if positive is None else positive.to(f),
            reduction="none",
        )

    def _scale(self, f: Tensor, y: Tensor) -> Tensor | None:
        """``w (1 - y + r y)``."""
        scale = None
        if self.pos_weight is not None:
            scale = 1 - y + self.pos_weight.detach().to(f) * y
        if self.entry_weight is not None:
            entry = self.entry_weight.detach().to(f).expand_as(f)
            scale = entry if scale is None else entry * scale
        return scale

    def _diagonal(self, f: Tensor, y: Tensor) -> Tensor:
        # 1 - sigmoid(f) would lose all digits for large f.
        variance = f.sigmoid() * (-f).sigmoid()
        scale = self._scale(f, y)
        return variance if scale is None else variance * scale

    def _checked(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        f, y = super()._checked(output, target)
        for name, given in (("pos_weight", self.pos_weight), ("weight", self.entry_weight)):
            if given is not None and not _broadcasts(given, f):
                raise SettingError(
                    f"BinaryCrossEntropy's {name} has the shape {list(given.shape)}, which does "
                    f"not broadcast to the output's {list(f.shape)}: pass one that does."
                )
        inside = (y >= 0) & (y <= 1)
        if not holds(inside):
            raise SettingError(
                f"BinaryCrossEntropy got the target {float(y[~inside][0])}, but targets must lie "
                "from 0 to 1: pass the probability of a positive answer."
            )
        return f, y

    def __repr__(self) -> str:
        return f"BinaryCrossEntropy(pos_weight={self.pos_weight!r}, weight={self.entry_weight!r})"


def _broadcasts(weights: Tensor, f: Tensor) -> bool:
    try:
        return tuple(torch.broadcast_shapes(weights.shape, f.shape)) == tuple(f.shape)
    except RuntimeError:
        return False
