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

How far small singular values are to grow is asked for: those below ``floor`` times their root mean
square are multiplied by what brings that one to 1, and so end between 0 and 1, in the right
direction. The chain above grows by 1,941, relative to the Frobenius norm. Where less is wanted it
begins at a later polynomial, whose interval ends near 2 instead of 1; where more, Newton-Schulz
goes on. Zero stays zero: the polar factor of a matrix of rank r has r singular values of 1.

In 16 bits (`half_polar`) the first Gram matrix and its square, which the first polynomial needs
anyhow, give the eighth Schatten norm, ``(sum of s^8)^(1/8)``. It is far nearer to the largest
singular value than the Frobenius norm is (1.8 instead of 10 times, of 100 equal ones), and that is
a polynomial or two less.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

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
# Where the intervals of the first five of them end: what the polynomials before make of [0, 1].
_ENDS = (1.0, 1.99171, 1.96597, 1.86572, 1.56042)
# Products in float32 round singular values up by 1e-6 or so, in bfloat16 by some thousandths. What
# leaves the interval of a polynomial at its upper end grows without bound in the next ones.
_SAFE, _SAFE_IN_HALF = 1.01, 1.02
WIDE = 1.5  # columns per row from which on the Gram matrix is less work
TOGETHER = 3  # polynomials of one Gram matrix: after the first three the smallest value is 0.13
FLOOR = 0.025
# Rounding to bfloat16 adds singular values of so much of their root mean square: what is smaller is
# not known.
_KNOWN_IN_HALF = 2.0**-8


class Chain(NamedTuple):
    """What a matrix of norm 1 is multiplied by, and the polynomials that follow."""

    scale: float
    polynomials: tuple[Polynomial, ...]


def polynomials(growth: float, safe: float = _SAFE) -> Chain:
    """The shortest chain that multiplies the smallest singular values by so much.

    Arguments:
        growth: of a singular value near 0, where no singular value is above 1.
        safe: by how much singular values may be above 1 all the same.
    """
    for first in reversed(range(len(_ENDS))):
        chain = COEFFICIENTS[first:-1]
        each = prod(a for a, _, _ in chain)
        if each * _ENDS[first] >= growth * safe:
            return Chain(growth / each, chain)
    last = COEFFICIENTS[-1]
    while growth * safe > each:
        chain, each = (*chain, last), each * last[0]
    return Chain(growth / each, chain)


def growth(floor: float, shape: Sequence[int]) -> float:
    """What the smallest singular values are multiplied by, relative to the Frobenius norm.

    Arguments:
        floor: share of the root mean square of all singular values.
        shape: ``(…, rows, cols)``.
    """
    return float(min(shape[-2:]) ** 0.5 / floor)


def polar(x: Tensor, floor: float = FLOOR) -> Tensor:
    """The polar factor of each matrix.

    Arguments:
        x: ``[b, rows, cols]``.
        floor: smaller singular values, as a share of their root mean square, end below 1.
    """
    rows, cols = x.shape[-2:]
    if rows > cols:
        turned: Tensor = polar(x.mT, floor).mT
        return turned
    norm = x.flatten(1).norm(dim=1).view(-1, 1, 1).clamp(min=torch.finfo(x.dtype).tiny)
    if rows == 1:  # the direction, exactly
        return x.div(norm)
    scale, chain = polynomials(growth(floor, x.shape))
    x = x / norm * scale
    return _of_gram(x, chain) if cols >= WIDE * rows else _of_matrix(x, chain)


def half_polar(x: Tensor, floor: float = FLOOR) -> Tensor:
    """The same by products of bfloat16 numbers: singular values are within some hundredths.

    On CPUs each matrix begins at the polynomial that its own spectrum allows, by itself, so that it
    does not matter which ones are stacked. Elsewhere the host would have to wait for that number,
    and all begin where the Frobenius norm allows it.

    Arguments:
        x: ``[b, rows, cols]`` of any dtype.
        floor: as for `polar`; less than 1/256 is taken as that, which is rounding.
    """
    if x.shape[-2] > x.shape[-1]:
        turned: Tensor = half_polar(x.mT, floor).mT
        return turned
    norm = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True, dtype=torch.float32)
    norm.clamp_(min=torch.finfo(torch.float32).tiny)
    # Contiguous: products that are written column by column are a hundred times slower on CPUs.
    near = (x / norm).to(torch.bfloat16, memory_format=torch.contiguous_format)
    most = growth(max(floor, _KNOWN_IN_HALF), x.shape)
    if x.is_cpu:
        return torch.cat([_of_its_spectrum(one, most) for one in near.split(1)])
    scale, chain = polynomials(most, _SAFE_IN_HALF)
    return _of_matrix(near.mul_(scale), chain)


def _of_its_spectrum(x: Tensor, most: float) -> Tensor:
    """``x [1, n, m]`` of Frobenius norm 1."""
    gram = x @ x.mT
    square = gram @ gram
    size = float(square.float().norm()) ** 0.25  # (sum of s^8)^(1/8), at most 1
    if not 0 < size < float("inf"):
        return x.mul_(size)  # of nothing, or not finite
    scale, chain = polynomials(most * size, _SAFE_IN_HALF)
    a, b, c = chain[0]
    by = scale / size
    inner = square.mul_(c * by**4).add_(gram, alpha=b * by**2)
    first: Tensor = torch.baddbmm(x, inner, x, beta=a * by, alpha=by)
    return _of_matrix(first, chain[1:])


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


def operations(rows: int, cols: int, floor: float) -> float:
    """Of one matrix.

    Arguments:
        rows: of the matrix.
        cols: of the matrix.
        floor: as for `polar`.
    """
    short, long = sorted((rows, cols))
    if short == 1:
        return 4.0 * long
    steps = len(polynomials(growth(floor, (rows, cols))).polynomials)
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
