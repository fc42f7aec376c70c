"""The inverse of a positive definite matrix, by products where that is faster.

Products run nearer to the peak of a machine than LAPACK's inverse does. Schur complements of half
the size, applied recursively, turn almost all of the work into large products.
"""

import torch
from torch import Tensor

_LEAF = 192


def cholesky_inverse(matrix: Tensor) -> Tensor:
    """``matrix^-1 [..., d, d]`` of symmetric positive definite ones; raises ``LinAlgError``."""
    factor = torch.linalg.cholesky(matrix, upper=True)
    return torch.cholesky_inverse(factor, upper=True)


def recursive_inverse_(matrix: Tensor) -> Tensor:
    """Replace ``matrix [d, d]`` by its inverse, by Schur complements of half the size.

    ``[[A, B], [B^T, C]]^-1`` from ``A^-1``, ``X = A^-1 B`` and ``S = C - B^T X``: almost all of the
    work becomes large products. Only the upper triangle is read. Raises ``LinAlgError``.
    """
    d = matrix.shape[0]
    if d <= _LEAF:
        return matrix.copy_(cholesky_inverse(matrix))
    h = (d // 2 + 15) // 16 * 16  # aligned halves multiply faster
    a, b, c = matrix[:h, :h], matrix[:h, h:], matrix[h:, h:]
    recursive_inverse_(a)
    x = a @ b
    c.addmm_(b.mT, x, alpha=-1)
    recursive_inverse_(c)
    y = x @ c
    a.addmm_(y, x.mT)
    b.copy_(y).neg_()
    matrix[h:, :h].copy_(b.mT)
    return matrix


def inverse_rows(matrix: Tensor, start: int, stop: int) -> Tensor:
    """Rows ``start`` to ``stop`` of ``matrix^-1``, ``[stop - start, d]`` of ``[d, d]``; raises
    ``LinAlgError``.

    With ``matrix = L L^T`` they are ``L^-T L^-1 e`` for the unit vectors ``e`` of these rows, as
    the inverse is symmetric: ``d^3 / 3`` operations for ``L``, and ``2 d^2`` a row. So k ranks that
    share the rows out need ``1 / 6 + 1 / k`` of the operations of the whole inverse each.
    """
    factor = torch.linalg.cholesky(matrix)
    rows = matrix.new_zeros(stop - start, len(matrix))
    rows[:, start:stop].fill_diagonal_(1.0)
    columns = rows.mT  # solved in place
    torch.linalg.solve_triangular(factor, columns, upper=False, out=columns)
    torch.linalg.solve_triangular(factor.mT, columns, upper=True, out=columns)
    return rows
