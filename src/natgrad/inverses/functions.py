"""Functions of a block, given by what they do to its eigenvalues: ``f(F) = Q f(l) Q^T``."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.damping import Damping, Relative

# Of eigenvalues ``[b, ...]``, entry by entry: a new tensor of the same shape.
Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class DampedPower:
    """``(l + damping)^exponent``: -1 is the damped inverse, -1/2 its root.

    Sums are kept above the rounding error of the largest eigenvalue, so that nothing divides by 0
    where there is no damping.

    Arguments:
        exponent: any number.
        damping: ``≥ 0``, added to every eigenvalue first; a `Relative` one is a share of the mean
            eigenvalue of each matrix.
    """

    exponent: float = -1.0
    damping: Damping = 0.0

    def __call__(self, values: Tensor) -> Tensor:
        """The function of eigenvalues, as a new tensor.

        Arguments:
            values: ``[b, …]``, eigenvalues of ``b`` matrices, none of them negative.
        """
        return self.of_part(values, values)

    def of_part(self, values: Tensor, everything: Tensor) -> Tensor:
        """The function of some eigenvalues, as a new tensor.

        Arguments:
            values: ``[b, …]``, some of the eigenvalues of ``b`` matrices.
            everything: ``[b, …]``, of which their mean and their largest are the matrices'.
        """
        if everything is values or not isinstance(self.damping, Relative):
            found = damped(values, self.damping)
        else:
            added = relative(self.damping, everything.flatten(1).mean(1))
            found = values + added.view(-1, *([1] * (values.ndim - 1)))
        found = floored(found, everything.flatten(1).amax(1))
        return found.reciprocal_() if self.exponent == -1 else found.pow_(self.exponent)


def damped(values: Tensor, damping: Damping) -> Tensor:
    """Eigenvalues with their damping, as a new tensor.

    Arguments:
        values: ``[b, …]``, eigenvalues of ``b`` matrices.
        damping: added to all of them; a `Relative` one is a share of each matrix's own mean.
    """
    if not isinstance(damping, Relative):
        return values + damping
    added = relative(damping, values.flatten(1).mean(1))
    return values + added.view(-1, *([1] * (values.ndim - 1)))


def relative(damping: Relative, means: Tensor) -> Tensor:
    """What a relative damping adds. A matrix without any curvature, as of a group of channels that
    was never active, is damped as one whose mean is 1: nothing divides by almost 0.

    Arguments:
        damping: a share of the mean.
        means: mean eigenvalue of each matrix.
    """
    return damping.share * torch.where(means > 0, means, torch.ones_like(means))


def floored(damped: Tensor, largest: Tensor) -> Tensor:
    """The eigenvalues, kept above the rounding error of the largest: nothing divides by 0.

    Arguments:
        damped: ``[b, …]``, eigenvalues with their damping.
        largest: ``[b]``, the largest eigenvalue of each matrix, without it.
    """
    floor = largest * torch.finfo(damped.dtype).eps
    floor = floor.clamp(min=torch.finfo(torch.float32).tiny ** 0.5)
    return torch.maximum(damped, floor.view(-1, *([1] * (damped.ndim - 1))))
