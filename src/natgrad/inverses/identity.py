"""The block of a weight whose curvature is not measured."""

from collections.abc import Iterator

import torch
from torch import Tensor

from natgrad.damping import Damping
from natgrad.inverses.decomposed import Decomposed
from natgrad.inverses.functions import Function, damped


class IdentityBlock(Decomposed):
    """Where no curvature is kept: ``F = I``."""

    def apply(self, function: Function, m: Tensor, out: Tensor | None = None) -> Tensor:
        scale = function(m.new_ones(len(m), 1, 1))
        return torch.mul(m, scale, out=out)

    def multiply(self, m: Tensor, damping: Damping) -> Tensor:
        return m * damped(m.new_ones(len(m), 1, 1), damping)

    def rotate(self, m: Tensor) -> Tensor:
        return m.clone()

    def rotate_back(self, m: Tensor) -> Tensor:
        return m

    def tensors(self) -> Iterator[Tensor]:
        return iter(())
