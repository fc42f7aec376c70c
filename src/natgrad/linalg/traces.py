"""Traces, diagonals and norms of a matrix from products with random signs, with standard errors.

    E[zᵀ A z] = tr A,    E[z ∘ A z] = diag A,    E[‖A z‖²] = ‖A‖²      (z of independent ±1)

With ``n`` products or more the value is exact, from products with the identity.
"""

from collections.abc import Callable, Iterator
from math import hypot, sqrt

import torch
from torch import Tensor

from natgrad.linalg.matrix_free import MatrixFree, Product, at_least, generator_of
from natgrad.linalg.results import Estimate, Number

Device = torch.device | str


def hutchinson(
    product: Product,
    n: int,
    samples: int = 100,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: Device = "cpu",
) -> Number:
    """``tr A`` as the mean of ``zᵀ A z`` over random signs ``z``: error ``√(2/samples) ‖A‖``.

    One product each.
    """
    matrix = MatrixFree(product, n, dtype, device)
    return _mean(matrix, at_least("samples", samples, 2), seed, lambda z, az: (z * az).sum(0))


def squared_norm(
    product: Product,
    n: int,
    samples: int = 100,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: Device = "cpu",
) -> Number:
    """``‖A‖²`` (Frobenius) as the mean of ``‖A z‖²`` over random signs ``z``, one product each."""
    matrix = MatrixFree(product, n, dtype, device)
    return _mean(matrix, at_least("samples", samples, 2), seed, lambda _, az: az.square().sum(0))


def diagonal(
    product: Product,
    n: int,
    samples: int = 100,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: Device = "cpu",
) -> Estimate:
    """``diag A [n]`` as the mean of ``z ∘ A z`` over random signs ``z``, one product each.

    The error of an entry is the norm of the rest of its row over ``√samples``.
    """
    matrix = MatrixFree(product, n, dtype, device)
    if at_least("samples", samples, 2) >= n:
        exact = sum((piece * matrix(piece)).sum(1) for piece in matrix.identity())
        assert isinstance(exact, Tensor)
        return Estimate(exact, torch.zeros_like(exact), matrix.products, _EXACT)
    mean = torch.zeros(n, dtype=torch.float64, device=_wide(matrix))
    spread = torch.zeros_like(mean)
    seen = 0
    # Means and squared deviations of batches are merged: differences of large sums would cancel.
    for z in _signs(matrix, samples, seed):
        each = (z * matrix(z)).to(mean)
        count, centre = each.shape[1], each.mean(1)
        spread += (each - centre[:, None]).square().sum(1)
        spread += (centre - mean).square() * (seen * count / (seen + count))
        mean += (centre - mean) * (count / (seen + count))
        seen += count
    error = (spread / (samples - 1) / samples).sqrt()
    error = torch.hypot(error, matrix.precision * mean.abs())
    return Estimate(
        mean.to(matrix.device, matrix.dtype),
        error.to(matrix.device, matrix.dtype),
        matrix.products,
        _signs_method(samples),
    )


def hutchpp(
    product: Product,
    n: int,
    products: int = 99,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: Device = "cpu",
) -> Number:
    """``tr A = tr QᵀAQ + tr (I-QQᵀ) A (I-QQᵀ)``, the second one by random signs (Hutch++).

    ``Q`` is the range of ``A`` on a third of the products, a third is ``A Q``. For decaying spectra
    the error falls as ``1 / products`` and faster (Meyer et al. 2021).
    """
    matrix = MatrixFree(product, n, dtype, device)
    if at_least("products", products, 6) >= n:
        return _mean(matrix, n, seed, lambda z, az: (z * az).sum(0))
    third, generator = products // 3, generator_of(seed)
    range_, _ = torch.linalg.qr(matrix(matrix.signs(third, generator)))
    inside = float((range_ * matrix(range_)).sum(0).cpu().double().sum())
    z = matrix.signs(products - 2 * third, generator)
    z = z - range_ @ (range_.T @ z)
    each = (z * matrix(z)).sum(0).cpu().double()
    method = f"Hutch++: {third} directions exactly, {_signs_method(len(each))} for the rest"
    return _number(matrix, each, inside, method)


def xtrace(
    product: Product,
    n: int,
    products: int = 100,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: Device = "cpu",
) -> Number:
    """``tr A`` as the mean of Hutch++ with each of ``m`` vectors left out of ``Q`` once (XTrace).

    Every vector serves the range and, left out of it, the rest, so that two products a vector do
    the work of three (Epperly et al. 2024). The vectors are normal ones, scaled to the
    length that is right for what is left of them.
    """
    matrix = MatrixFree(product, n, dtype, device)
    if at_least("products", products, 6) >= n:
        return _mean(matrix, n, seed, lambda z, az: (z * az).sum(0))
    m = products // 2
    z = matrix.gaussians(m, generator_of(seed))
    q, r = torch.linalg.qr(matrix(z))
    h, w, r = (x.cpu().double() for x in (q.T @ matrix(q), q.T @ z, r))
    lengths = z.square().sum(0).cpu().double()
    # Q without column i is Q (I - s sᵀ) Qᵀ, where s is orthogonal to all other columns of R.
    tiny = matrix.precision * float(r.abs().max()) or 1.0
    solid = r + torch.where(r.diagonal().abs() < tiny, tiny, 0.0).diag()
    s = torch.linalg.solve_triangular(solid, torch.eye(m, dtype=r.dtype), upper=True).T
    s = s / s.norm(dim=0)
    # What is left of z_i is z - Q w + a Q s, a = sᵀ w; Qᵀ A z_i is column i of R.
    a, shs = (s * w).sum(0), (s * (h @ s)).sum(0)
    rest = (w * (h @ w)).sum(0) - (w * r).sum(0)
    rest = rest + 2 * a * ((r * s).sum(0) - (w * (h @ s)).sum(0)) + a.square() * shs
    rest = rest * (n - m + 1) / (lengths - w.square().sum(0) + a.square())
    method = f"XTrace: {m} directions, each left out once"
    return _number(matrix, rest - shs, float(h.trace()), method, _SHARED)


# The estimates of XTrace share all their vectors but one: their mean scatters up to that much more
# than that of independent ones would.
_SHARED = sqrt(2)
_EXACT = "exact: products with the identity"


def _mean(
    matrix: MatrixFree, samples: int, seed: int, read: Callable[[Tensor, Tensor], Tensor]
) -> Number:
    """The mean of ``read(z, A z) [k]`` over random signs, or its sum over the identity."""
    if samples >= matrix.n:
        total = sum(
            float(read(piece, matrix(piece)).cpu().double().sum()) for piece in matrix.identity()
        )
        return Number(total, _EXACT, 0.0, matrix.products)
    each = torch.cat([read(z, matrix(z)).cpu().double() for z in _signs(matrix, samples, seed)])
    return _number(matrix, each, 0.0, _signs_method(samples))


def _number(
    matrix: MatrixFree, each: Tensor, exact: float, method: str, shared: float = 1.0
) -> Number:
    """``exact`` plus the mean of ``each [m]``; rounding is a part of the error."""
    mean = float(each.mean())
    rounding = matrix.precision * (abs(exact) + abs(mean))
    error = hypot(shared * float(each.std()) / sqrt(len(each)), rounding)
    return Number(exact + mean, method, error, matrix.products)


def _signs(matrix: MatrixFree, samples: int, seed: int) -> Iterator[Tensor]:
    """``[n, k]`` of random signs, ``samples`` columns in all."""
    generator = generator_of(seed)
    for first in range(0, samples, matrix.width):
        yield matrix.signs(min(matrix.width, samples - first), generator)


def _signs_method(samples: int) -> str:
    return f"{samples} vectors of random signs"


def _wide(matrix: MatrixFree) -> torch.device:
    """Where float64 can be had."""
    return torch.device("cpu") if matrix.device.type == "mps" else matrix.device
