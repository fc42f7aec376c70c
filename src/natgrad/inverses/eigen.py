"""``F = Q diag(l) Q^T``, damped when applied: exact for the whole block (Pauloski 2022, eq. 13)."""

from dataclasses import dataclass

from torch import Tensor

from natgrad.inverses.base import Parts
from natgrad.inverses.basis import Basis
from natgrad.inverses.spectral import Diagonalization
from natgrad.linalg.eigh import eigh
from natgrad.specs import FactorSpec


@dataclass(frozen=True)
class Eigen(Diagonalization):
    """The joint damping ``1 / (l_G l_A + damping)`` is exact for ``(A x G + damping I)^-1``, and a
    damping schedule acts at once."""

    def decompose(self, matrix: Tensor, damping: Tensor) -> Parts:
        values, rows = eigh(matrix)
        return rows, values.clamp_(min=0.0)

    def basis(self, parts: Parts) -> Basis:
        rows, values = parts
        return Basis(rows, values)

    def shapes(self, spec: FactorSpec) -> tuple[tuple[int, ...], ...]:
        return (spec.batch, spec.dim, spec.dim), (spec.batch, spec.dim)
