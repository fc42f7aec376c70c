"""The polar factor of a whitened matrix, brought back: ``L polar(L M R) R``, by fewer products.

With ``X = L M R`` the polar factor is ``z(X X^T) X``, ``z(k) = k^(-1/2)``. So neither ``X`` nor the
root ``R`` is needed, only ``R^2``:

    N = L M,    Y = N R^2,    K = Y N^T = X X^T,    L polar(X) R = L z(K) Y

Of ``[n, m]`` with ``n <= m`` that is one product with the long side instead of two, three of the
size ``n n m``, and two ``[n, n]``. ``z(K)`` comes from the eigenvalues of ``K``, for which LAPACK
takes as long as for six products of this size (n = 1,024) or eight (n = 256); the polynomials of
`natgrad.linalg.polar` are eighteen. So this is for CPUs.

No singular value is multiplied by more than ``most``, relative to the Frobenius norm. So those
below ``1 / most`` end between 0 and 1, in the right direction, as with polynomials, and what is
zero but for its rounding stays next to nothing. ``K`` knows a singular value by its square, and
rounding moves its eigenvalues by ``eps |N| |Y|``; what is smaller is not known, and is multiplied
by no more than that one would be. In float32 this is at a thousandth where factors are near the
identity, at some thousandths where they stretch by much.
"""

from functools import partial

import torch
from torch import Tensor

from natgrad.linalg.block_diagonal import Matrix
from natgrad.linalg.products import product, sandwiched
from natgrad.linalg.threads import at_once, spread
from natgrad.linalg.workspace import workspace

_ROUNDING = 4.0  # eigenvalues of K are known up to so many times eps |N| |Y|
_TINY = 32  # rows up to which LAPACK costs more to start than to do
_THREADS = 64  # rows from which on a decomposition is worth a thread of its own


def whitened_polar(
    left: Matrix | None, m: Tensor, square: Matrix | None, most: float, out: Tensor
) -> Tensor:
    """``left polar(left m right) right`` for the ``right`` that has this square.

    Arguments:
        left: ``[b, n, n]``, whole or in blocks, a diagonal ``[b, n]``, or ``None`` for the
            identity; symmetric.
        m: ``[b, n, m]``, ``n <= m``.
        square: ``[b, m, m]``, whole or in blocks, ``[b, m]``, or ``None``; symmetric.
        most: that a singular value of the whitened matrix, over its Frobenius norm, is multiplied
            by.
        out: ``[b, n, m]``, where the result is written; shares no memory with ``m``.
    """
    info = torch.finfo(m.dtype)
    near = sandwiched(left, m, None, out)
    near /= torch.linalg.vector_norm(near, dim=(1, 2), keepdim=True).clamp_(min=info.tiny)
    far = sandwiched(None, near, square, workspace("far", (m.numel(),), m).view(m.shape))
    grams = product(far, near.mT, m.new_empty(len(m), m.shape[1], m.shape[1]))
    # Eigenvalues are shares of the whole, the squared Frobenius norm of X.
    whole = grams.diagonal(dim1=1, dim2=2).sum(1).clamp_(min=info.tiny)
    grams /= whole.view(-1, 1, 1)
    least = torch.linalg.vector_norm(far, dim=(1, 2)) / whole * (_ROUNDING * info.eps)
    least.clamp_(min=most**-2)
    roots = sandwiched(left, _roots(grams, least), None, grams)
    roots *= whole.rsqrt().view(-1, 1, 1)
    return product(roots, far, out)


def _roots(grams: Tensor, least: Tensor) -> Tensor:
    """``K^(-1/2) [b, n, n]``, with eigenvalues below ``least [b]`` raised to it. What is not finite
    gives numbers that are not."""
    good = torch.isfinite(grams.flatten(1).sum(1))
    if not bool(good.all()):
        eye = torch.eye(grams.shape[1], dtype=grams.dtype, device=grams.device)
        grams = torch.where(good.view(-1, 1, 1), grams, eye)
        least = torch.where(good, least, torch.full_like(least, torch.nan))
    out = torch.empty_like(grams)
    count = min(at_once(), len(grams)) if grams.shape[1] >= _THREADS else 1
    shares = zip(*(t.tensor_split(count) for t in (grams, least, out)), strict=True)
    for _ in spread([partial(_root, *share) for share in shares]):
        pass
    return out


def _root(grams: Tensor, least: Tensor, out: Tensor) -> None:
    """As many at a time as make one call of LAPACK worth it."""
    at_a_time = len(grams) if grams.shape[1] <= _TINY else 1
    parts = zip(*(t.split(at_a_time) for t in (grams, least, out)), strict=True)
    for some, floor, into in parts:
        try:
            values, vectors = torch.linalg.eigh(some)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            values, vectors = (one.to(some.dtype) for one in torch.linalg.eigh(some.double()))
        scale = values.maximum(floor.unsqueeze(1)).rsqrt_().unsqueeze(1)
        product(vectors * scale, vectors.mT, into)
