"""What decompositions are done by, and what these cost: operations and numbers in memory. No torch.

one rank           decompose
k ranks together   repeated + shared / k, each with its rows of the inverse
"""

from enum import StrEnum
from typing import NamedTuple


class Routine(StrEnum):
    """What a decomposition is done by: a computer that has been measured knows how many operations
    of it take a second, which differs between them."""

    PRODUCT = "product"
    EIGEN = "eigen"
    CHOLESKY = "cholesky"

    def operations(self, dim: float) -> float:
        """Operations for one matrix: a product of two, an eigendecomposition with all vectors, or
        the inverse of a positive definite one.

        Arguments:
            dim: its rows.
        """
        return (25.0 if self is Routine.EIGEN else 2.0) * dim**3

    def workspace(self, dim: int, batch: int = 1) -> int:
        """Numbers that are allocated at its busiest moment: the matrices, what becomes of them, and
        what LAPACK works in, one matrix after the other.

        Arguments:
            dim: rows of each matrix.
            batch: how many there are.
        """
        square, all_squares = dim * dim, batch * dim * dim
        match self:
            case (
                Routine.EIGEN
            ):  # of all but the last one the vectors are there; then all are copied
                last = 2 * all_squares + batch * dim + 2 * square + 11 * dim
                return max(last, 3 * all_squares + 2 * batch * dim)
            case Routine.CHOLESKY if dim <= _BATCHED:
                return 3 * all_squares
            case Routine.CHOLESKY:
                return all_squares + _schur(dim)
            case _:
                return 3 * all_squares

    def rows_workspace(self, dim: int, rows: int) -> int:
        """Numbers that are allocated at the busiest moment where only some rows of the inverse are
        made: the matrix, its Cholesky factor, and the rows.

        Arguments:
            dim: rows of the matrix.
            rows: of its inverse that are made.
        """
        return 2 * dim * dim + rows * dim


# As `natgrad.inverses.cholesky` and `natgrad.linalg.spd_inverse` have them.
_BATCHED, _LEAF = 32, 192


def _schur(dim: int) -> int:
    """Numbers beside a matrix that is inverted in place by Schur complements of half the size."""
    if dim <= _LEAF:
        return 2 * dim * dim
    half = (dim // 2 + 15) // 16 * 16
    beside = half * (dim - half)
    return max(_schur(half), beside + _schur(dim - half), 2 * beside)


class FactorCost(NamedTuple):
    """What an inverse costs for one factor.

    Arguments:
        decompose: operations to decompose the factor once.
        apply: operations to apply it, for each number of the gradient, at every step.
        by: the routine that decomposes it; products where nothing is said.
        repeated: where several ranks decompose it together, operations that each of them does.
        shared: operations that they share out among them, by rows of the inverse; ``None`` where
            they cannot.
    """

    decompose: float
    apply: float
    by: Routine = Routine.PRODUCT
    repeated: float = 0.0
    shared: float | None = None

    def split(self, ranks: int) -> "FactorCost":
        """What each of several ranks does.

        Arguments:
            ranks: that decompose the factor together.
        """
        assert self.shared is not None
        return self._replace(decompose=self.repeated + self.shared / ranks)
