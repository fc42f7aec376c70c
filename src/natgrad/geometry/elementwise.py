"""Adam's step in the eigenbasis of the curvature: each coordinate over the root of its square.

    r = Q_G^T M Q_A,    v = mean of (Q_G^T grad Q_A)^2,    step = Q_G (r / (sqrt(v) + eps)) Q_A^T

SOAP (Vyas et al. 2024) takes the eigenbasis of Shampoo's factors, made of the batch's mean
gradient; here it is that of the Fisher's factors, made of every sample. As there, second moments
stay with the number of the coordinate when a refresh turns the basis a little.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.checks import FRACTION, POSITIVE, check_numbers
from natgrad.damping import Damping
from natgrad.geometry.base import Geometry, Kept, Shape
from natgrad.inverses import Decomposed, Diagonalization, Inverse
from natgrad.inverses.base import no_basis

_NOISE = 64.0  # rounding errors of a rotated gradient, over those of its largest coordinate


@dataclass(frozen=True)
class Elementwise(Geometry):
    """Needs an inverse that has an eigenbasis, such as ``Eigen()``. No damping enters.

    Arguments:
        decay: weight of the past in the second moments.
        eps: added to their roots.
    """

    decay: float = 0.95
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_numbers(self, decay=FRACTION, eps=POSITIVE)

    @property
    def measures_in_basis(self) -> bool:
        return True

    def check(self, inverse: Inverse) -> None:
        if not isinstance(inverse, Diagonalization):
            raise no_basis(inverse)

    def kept(self, shape: Shape) -> dict[str, tuple[int, ...]]:
        return {"second": shape, "second_weight": shape[:1]}

    def operations(self, shape: Shape) -> float:
        groups, rows, cols = shape
        return groups * (2.0 * rows * cols * (rows + cols) + 8.0 * rows * cols)

    def observe(self, block: Decomposed, gradient: Tensor, fits: Tensor, kept: Kept) -> None:
        second, weight = kept["second"], kept["second_weight"]
        gain = fits.to(weight.dtype) * (1 - self.decay)
        squares = block.rotate(gradient).square_()
        second.lerp_(squares, gain.view(-1, 1, 1).expand_as(second))
        weight.lerp_(torch.ones_like(weight), gain)

    def step(self, block: Decomposed, m: Tensor, kept: Kept, damping: Damping, out: Tensor) -> None:
        weight = kept["second_weight"].clamp(min=torch.finfo(m.dtype).tiny).view(-1, 1, 1)
        root = (kept["second"] / weight).sqrt_()
        # With fewer samples than dimensions most coordinates have no gradient: rounding errors over
        # rounding errors would be steps as long as all others.
        seen = root > _NOISE * torch.finfo(m.dtype).eps * root.amax((1, 2), keepdim=True)
        turned = block.rotate(m).div_(root.add_(self.eps)).mul_(seen)
        out.copy_(block.rotate_back(turned))
