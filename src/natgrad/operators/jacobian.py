"""The Jacobian of the outputs, ``J [N D, P]``: row ``n D + d`` is the gradient of ``f_nd``."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.curvature.losses import Loss
from natgrad.operators.data import Batch
from natgrad.operators.outer import OuterProducts
from natgrad.operators.problem import Problem
from natgrad.operators.vectors import Vectors


@dataclass(frozen=True)
class UnitVectors(Vectors):
    """Every output by itself, so that the rows are those of the Jacobian."""

    def per_sample(self, loss: Loss, output: Tensor) -> int:
        return output[0].numel()

    def stacks(self, loss: Loss, output: Tensor, batch: Batch, index: int) -> Iterator[Tensor]:
        n, d = len(output), output[0].numel()
        one = torch.eye(d, dtype=output.dtype, device=output.device).unsqueeze(1)
        # All at once: rows of one sample must stay together.
        yield one.expand(d, n, d).reshape(d, *output.shape)

    def scale(self, problem: Problem) -> float:
        return 1.0


def jacobian(problem: Problem) -> OuterProducts:
    """``Jᵀ J``: ``rows()`` gives ``J``, ``gram()`` ``J Jᵀ`` and ``combined(u)`` ``Jᵀ u``.

    Arguments:
        problem: model, loss and data.
    """
    return OuterProducts(problem, UnitVectors(), "Jacobian")
