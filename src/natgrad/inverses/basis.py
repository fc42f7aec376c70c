"""The eigenvectors and eigenvalues of a factor, as structures and decomposed blocks see them."""

from typing import NamedTuple

from torch import Tensor

from natgrad.inverses.functions import Function
from natgrad.linalg.block_diagonal import BlockDiagonal, Matrix
from natgrad.linalg.products import scaled


class Basis(NamedTuple):
    """``F = Q diag(values) Q^T``.

    Arguments:
        rows: ``Q^T [b, d, d]``, an eigenvector a row; empty where ``Q`` is the identity.
        values: ``[b, d]``, eigenvalues, none of them negative.
    """

    rows: Matrix
    values: Tensor

    @property
    def is_identity(self) -> bool:
        return self.rows.numel() == 0

    def coordinates(self, t: Tensor) -> Tensor:
        """``t Q``: the vectors in the eigenbasis.

        Arguments:
            t: ``[b, n, s, d]``, vectors along the last axis.
        """
        if isinstance(self.rows, BlockDiagonal):
            return self.rows.mT.right_of(t.flatten(1, 2)).view(t.shape)
        return t if self.is_identity else t @ self.rows.mT.unsqueeze(1)

    def root(self, function: Function) -> Matrix:
        """``Q f(values) Q^T [b, d, d]``, or ``f(values) [b, d]`` where ``Q`` is the identity.

        Arguments:
            function: ``f`` of eigenvalues, entry by entry, such as ``DampedPower(-0.5)``.
        """
        scale = function(self.values)
        if self.is_identity:
            return scale
        if isinstance(self.rows, BlockDiagonal):
            return self.rows.mT.times(self.rows.scaled_rows(scale))
        return self.rows.mT @ scaled(scale, self.rows)


Bases = tuple[Basis | None, Basis | None]
