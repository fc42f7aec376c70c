"""The Gauss-Newton matrix of squared residuals, ``L = Σ_t w_t mean_n r_tn²``.

    G = Σ_t 2 w_t / N_t Σ_n (∂r_tn/∂θ)(∂r_tn/∂θ)ᵀ

A residual may be anything that a network and its derivatives make of a point: the error of a
differential equation inside of a domain, of its values on the border, of its fit to data.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from natgrad.curvature.fisher import Fisher
from natgrad.curvature.likelihoods import Gaussian

_OF_SQUARES = Gaussian(variance=0.5)  # -log p = r², up to a constant


@dataclass(frozen=True)
class GaussNewton(Fisher):
    """The Gauss-Newton matrix of the residuals that ``kfac.residuals(...)`` is given, also where
    they depend on derivatives of the network by its inputs.

    Each entry of a point's residual is a further backward pass, on steps that measure curvature.
    """

    of_residuals: ClassVar[bool] = True

    def vectors(
        self,
        output: Tensor,
        targets: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:
        return _OF_SQUARES.exact(output)

    def passes(self, output: Tensor) -> int:
        return _OF_SQUARES.passes(output)
