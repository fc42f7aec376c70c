"""Stacks of matrix products, and products with a Kronecker product, ``(G x A) vec(M) = G M A``.

Preconditioning is nothing but such products, two for explicit inverses and four in an eigenbasis.
On CPUs a stack is one batched product where single ones are too small to fill all threads, and a
loop where each fills them by itself.
"""

import torch
from torch import Tensor

from natgrad.linalg.block_diagonal import BlockDiagonal, Matrix
from natgrad.linalg.workspace import workspace

# Up to this many multiplications a product costs more to start than to do.
_SMALL = 4e7
# From this many rows on a product fills the threads by itself.
_TALL = 768


def product(left: Matrix, right: Matrix, out: Tensor) -> Tensor:
    """``out [b, m, n] = left [b, m, k] @ right [b, k, n]``, at most one of them in blocks."""
    if isinstance(left, BlockDiagonal):
        assert isinstance(right, Tensor)
        return left.left_of(right, out)
    if isinstance(right, BlockDiagonal):
        return right.right_of(left, out)
    b, m, k = left.shape
    if b > 1 and (m * k * right.shape[2] <= _SMALL or _batch_pays(b, m, left.device)):
        return torch.bmm(left, right, out=out)
    for i in range(b):
        torch.mm(left[i], right[i], out=out[i])
    return out


def _batch_pays(count: int, rows: int, device: torch.device) -> bool:
    """Whether a thread for each product keeps them busier than all threads for one at a time,
    which they share the better, the more rows it has."""
    threads = torch.get_num_threads()
    busy = count / (-(-count // threads) * threads)
    return device.type == "cpu" and rows < _TALL and busy > rows / (rows + 96)


def two_sided(
    left: Matrix, m: Tensor, right: Matrix, out: Tensor, scratch: Tensor | None = None
) -> Tensor:
    """``out = left @ m @ right`` for ``m [b, r, c]``; an empty factor stands for the identity.

    ``scratch``: of the shape of ``m``, to be overwritten."""
    if left.numel() == 0 and right.numel() == 0:
        return out.copy_(m)
    if left.numel() == 0:
        return product(m, right, out)
    if right.numel() == 0:
        return product(left, m, out)
    if scratch is None:
        scratch = workspace("two_sided", (m.numel(),), m).view(m.shape)
    return product(product(left, m, scratch), right, out)


def sandwiched(
    left: Matrix | None, m: Tensor, right: Matrix | None, out: Tensor | None = None
) -> Tensor:
    """``left m right``.

    Arguments:
        left: ``[b, r, r]``, whole or in blocks, a diagonal ``[b, r]``, or ``None`` for the
            identity.
        m: ``[b, r, c]``.
        right: ``[b, c, c]``, ``[b, c]``, or ``None``.
        out: ``[b, r, c]``, where the result is written; ``None`` makes a new tensor.
    """
    empty = m.new_empty(0)
    first, last = (empty if side is None or side.ndim == 2 else side for side in (left, right))
    out = two_sided(first, m, last, torch.empty_like(m) if out is None else out)
    if isinstance(left, Tensor) and left.ndim == 2:
        out *= left.unsqueeze(2)
    if isinstance(right, Tensor) and right.ndim == 2:
        out *= right.unsqueeze(1)
    return out


def scaled(values: Tensor, m: Tensor) -> Tensor:
    """``diag(values) m`` for ``values [b, d]`` and ``m [b, d, k]``."""
    return values.unsqueeze(-1) * m


def filtered(rows_g: Matrix, rows_a: Matrix, m: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    """``out = Q_G ((Q_G^T m Q_A) * scale) Q_A^T`` for ``m [b, r, c]``; ``rows`` are ``Q^T``."""
    space, scratch = workspace("filtered", (2, m.numel()), m).view(2, *m.shape)
    columns_g = rows_g.mT if rows_g.ndim == 3 else rows_g
    columns_a = rows_a.mT if rows_a.ndim == 3 else rows_a
    rotated = two_sided(rows_g, m, columns_a, space, scratch).mul_(scale)
    return two_sided(columns_g, rotated, rows_a, out, scratch)
