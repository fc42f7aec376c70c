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
