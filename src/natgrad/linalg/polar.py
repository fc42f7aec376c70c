"""The polar factor ``U V^T`` of ``X = U S V^T``, by products alone.

Odd polynomials ``p(X) = X (a + b X^T X + c (X^T X)^2)`` act on singular values one by one. A chain
of them that brings all of ``[l, 1]`` near 1 turns ``X`` into its polar factor: three products a
polynomial and no decomposition, batched over matrices of one shape. The classical choice
``(15, -10, 3) / 8`` (Newton-Schulz) needs many steps while singular values are small: each only
grows them by 1.875. Here each polynomial is the best one on the interval that the polynomials
before it have left (Amsel et al. 2025); the first ones grow small values by 8 and 4, the last one
is Newton-Schulz itself.

A wide matrix ``[n, m]`` has the same polynomials of its Gram matrix ``X X^T [n, n]`` alone, three
at a time: ``X <- q_3 q_2 q_1 X`` with ``q_i = a + b G_i + c G_i^2``, ``G_(i+1) = q_i G_i q_i``, so
that ``X`` itself is multiplied twice instead of six times. A Gram matrix knows a small singular
value by its square, so in float32 rounding shows at 1e-3. That does no harm while values are small,
where polynomials hardly depend on them; before they matter, ``G`` is computed anew. (Of one ``G``
for all six polynomials values of 1e-3 end 0.3% from 1, instead of 0.12%.)

How near it comes depends on the smallest singular value, relative to the Frobenius norm that the
matrix is divided by first: what is too small ends between 0 and 1, in the right direction. Zero
stays zero: the polar factor of a matrix of rank r has r singular values of 1.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

Polynomial = tuple[float, float, float]

# Of the best odd polynomials of degree 5, one after the other, for singular values in [1e-3, 1]
# (Amsel et al. 2025), the interval kept a little wider than the last one left it.
COEFFICIENTS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
# Products in float32 round singular values up by 1e-6 or so; a first polynomial that ends above 1
# by a little would leave the interval of the second.
_SAFE = 1.01
WIDE = 1.5  # columns per row from which on the Gram matrix is less work
TOGETHER = 3  # polynomials of one Gram matrix: after the first three the smallest value is 0.13


def polar(x: Tensor, steps: int = 6) -> Tensor:
    """The polar factor of each matrix.

    Arguments:
        x: ``[b, rows, cols]``.
        steps: polynomials, at least 1. Five bring singular values above 1/1,000 of the Frobenius
            norm to 1 within 13%, six within 0.13%; one of 1/10,000 ends at 0.1 and 0.2.
    """
    rows, cols = x.shape[-2:]
    if rows > cols:
        turned: Tensor = polar(x.mT, steps).mT
        return turned
    norm = x.flatten(1).norm(dim=1).view(-1, 1, 1)
    if rows == 1:  # the direction, exactly
        return x.div(norm.clamp(min=torch.finfo(x.dtype).tiny))
    x = x / (norm * _SAFE).clamp(min=torch.finfo(x.dtype).tiny)
    chain = _chain(steps)
    return _of_gram(x, chain) if cols >= WIDE * rows else _of_matrix(x, chain)


def growth(steps: int) -> float:
    """What the smallest singular values are multiplied by, relative to the Frobenius norm: 1,904
    for six polynomials.

    Arguments:
        steps: polynomials.
    """
    return prod(a for a, _, _ in _chain(steps))


def _chain(steps: int) -> list[Polynomial]:
    last = len(COEFFICIENTS) - 1
    return [COEFFICIENTS[min(step, last)] for step in range(steps)]


def _of_matrix(x: Tensor, chain: Sequence[Polynomial]) -> Tensor:
    """Three products a polynomial. ``x`` is overwritten."""
    other, gram = torch.empty_like(x), x.new_empty(len(x), x.shape[1], x.shape[1])
    inner = torch.empty_like(gram)
    for a, b, c in chain:
        torch.bmm(x, x.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=inner)
        torch.baddbmm(x, inner, x, beta=a, out=other)
        x, other = other, x
    return x


def _of_gram(x: Tensor, chain: Sequence[Polynomial]) -> Tensor:
    """Two products with ``x [b, n, m]`` for every `TOGETHER` polynomials, the others ``[n, n]``.
    ``x`` is overwritten."""
    other, gram = torch.empty_like(x), x.new_empty(len(x), x.shape[1], x.shape[1])
    half, factor = torch.empty_like(gram), torch.empty_like(gram)
    for first in range(0, len(chain), TOGETHER):
        some = chain[first : first + TOGETHER]
        torch.bmm(x, x.mT, out=gram)
        whole: Tensor | None = None
        for place, (a, b, c) in enumerate(some):
            torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=factor)
            factor.diagonal(dim1=1, dim2=2).add_(a)
            whole = factor.clone() if whole is None else factor @ whole
            if place + 1 < len(some):
                torch.bmm(gram, factor, out=half)
                torch.bmm(factor, half, out=gram)
        assert whole is not None
        torch.bmm(whole, x, out=other)
        x, other = other, x
    return x


def operations(rows: int, cols: int, steps: int) -> float:
    """Of one matrix.

    Arguments:
        rows: of the matrix.
        cols: of the matrix.
        steps: polynomials.
    """
    short, long = sorted((rows, cols))
    if short == 1:
        return 4.0 * long
    if long < WIDE * short:
        return steps * (4.0 * short**2 * long + 2.0 * short**3)
    grams = -(-steps // TOGETHER)
    # Of each polynomial a square, of each but the first of a Gram matrix three products more.
    squares = steps + 3 * (steps - grams)
    return grams * 4.0 * short**2 * long + squares * 2.0 * short**3


def exact_polar(x: Tensor) -> Tensor:
    """The same by singular value decompositions: slow, and the oracle of `polar`.

    Arguments:
        x: ``[b, rows, cols]``.
    """
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    there = s > s.amax(1, keepdim=True) * torch.finfo(x.dtype).eps * max(x.shape[-2:])
    found: Tensor = u @ (there.to(x.dtype).unsqueeze(2) * vt)
    return found
