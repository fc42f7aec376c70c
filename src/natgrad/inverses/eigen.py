"""``F = Q diag(l) Q^T``, damped when applied: exact for the whole block (P4, O14)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from natgrad.inverses.base import Inverse, Parts
from natgrad.linalg.products import product, scaled
from natgrad.specs import FactorSpec


@dataclass(frozen=True)
class Eigen(Inverse):
    """Parts: ``Q^T [b, d, d]`` (empty for a diagonal factor) and eigenvalues ``[b, d]``.

    The joint damping ``1 / (l_G l_A + damping)`` is exact for ``(A x G + damping I)^-1``, and a
    damping schedule acts at once.
    """

    joint: ClassVar[bool] = True

    def decompose(self, matrix: Tensor, damping: Tensor) -> Parts:
        # One at a time: batched eigh is slower than a loop for anything but tiny matrices.
        if matrix.shape[1] > 32:
            pairs = [torch.linalg.eigh(one, UPLO="U") for one in matrix]
            values = torch.stack([pair[0] for pair in pairs])
            rows = torch.stack([pair[1].mT for pair in pairs])
        else:
            values, vectors = torch.linalg.eigh(matrix, UPLO="U")
            rows = vectors.mT.contiguous()
        return rows, values.clamp_(min=0.0)

    def decompose_diagonal(self, values: Tensor, damping: Tensor) -> Parts:
        return values.new_empty(len(values), 0), values.clamp(min=0.0)

    def shapes(self, spec: FactorSpec) -> tuple[tuple[int, ...], ...]:
        rows = (spec.batch, 0) if spec.diagonal else (spec.batch, spec.dim, spec.dim)
        return rows, (spec.batch, spec.dim)

    def solve(self, parts: Parts, m: Tensor, damping: float) -> Tensor:
        rows, values = parts
        inverse = floored(values + damping, values.amax(1)).reciprocal_()
        return self._filtered(rows, inverse, m)

    def multiply(self, parts: Parts, m: Tensor, damping: float) -> Tensor:
        rows, values = parts
        return self._filtered(rows, values, m)

    def _filtered(self, rows: Tensor, values: Tensor, m: Tensor) -> Tensor:
        """``Q diag(values) Q^T m``."""
        if rows.numel() == 0:
            return scaled(values, m)
        rotated = scaled(values, product(rows, m, torch.empty_like(m)))
        return product(rows.mT, rotated, torch.empty_like(m))

    def error(self, parts: Parts, matrix: Tensor, damping: Tensor) -> Tensor:
        """``|Q^T F Q - diag| / |F|``: what is left beside the diagonal in the old basis."""
        rows, values = parts
        if rows.numel() == 0:  # nothing to rotate: how far the values themselves have moved
            now = matrix.diagonal(dim1=1, dim2=2)
            moved: Tensor = (now - values).norm() / now.norm().clamp(min=1e-30)
            return moved
        rotated = rows @ matrix @ rows.mT
        total = rotated.norm()
        beside = rotated - torch.diag_embed(rotated.diagonal(dim1=1, dim2=2))
        error: Tensor = beside.norm() / total.clamp(min=1e-30)
        return error


def floored(damped: Tensor, largest: Tensor) -> Tensor:
    """``damped [b, ...]`` kept above rounding error of ``largest [b]``: nothing divides by 0."""
    floor = largest * torch.finfo(damped.dtype).eps
    floor = floor.clamp(min=torch.finfo(torch.float32).tiny ** 0.5)
    return torch.maximum(damped, floor.view(-1, *([1] * (damped.ndim - 1))))
