"""The largest eigenpairs of a wide factor, and one number for all others.

    F ~ U diag(l) U^T + r (I - U U^T),    r = (tr F - sum l) / (d - k)

A range finder (Halko, Martinsson & Tropp 2011, alg. 4.4 and 5.3) multiplies F with ``k + 8`` random
vectors, a few times, and decomposes what is left of it in their span: ``2 d^2 (k + 8)`` operations
a product instead of ``25 d^3``. No rank-k matrix has a smaller error in the spectral norm than the
first eigenvalue that is left out; with ``q`` products in all the expected one is at most

    (1 + sqrt(k / 7) + e/8 sqrt(k + 8) sqrt(d - k))^(1 / q)

times that (their corollary 10.10), which is small where spectra fall fast. `Inverse.error` measures
what it comes to, and ``kfac.drift()`` shows it.

While fewer than ``k`` rows were seen, F has no other eigenvalues, ``r`` is 0 and nothing is left
out: the same result as by way of the Gram matrix of the rows, which running averages do not keep.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.checks import check_whole
from natgrad.inverses.base import Inverse, Parts
from natgrad.linalg.eigh import eigh
from natgrad.specs import FactorCost, FactorSpec, Routine

_MORE = 8  # random vectors beside those that are kept


@dataclass(frozen=True)
class LowRank(Inverse):
    """The ``rank`` largest eigenpairs of each factor; the others are replaced by their mean.

    Like ``Cholesky()`` it damps each factor with the pi-correction, and a changed damping acts at
    the next refresh. Factors of less than three times the rank are decomposed exactly.

    Arguments:
        rank: eigenpairs that are kept of a factor, all of a narrower one.
        products: further products with the factor, each of which brings the span nearer to that of
            the largest eigenvectors.
    """

    rank: int = 256
    products: int = 2

    def __post_init__(self) -> None:
        check_whole(self.rank, "LowRank.rank", low=1)
        check_whole(self.products, "LowRank.products", low=0)

    def decompose(self, matrix: Tensor, damping: Tensor) -> Parts:
        d = matrix.shape[1]
        k = min(self.rank, d)
        if self._exact(d):
            values, rows = eigh(matrix)  # ascending
            values, rows = values[:, d - k :], rows[:, d - k :]
        else:
            values, rows = self._sketched(matrix, k)
        values = values.clamp(min=0.0)
        trace = matrix.diagonal(dim1=1, dim2=2).sum(1)
        # Where nothing is left it may be any number, and must not be one that others vanish beside.
        rest = (trace - values.sum(1)) / (d - k) if k < d else values.amin(1)
        rest = rest.clamp(min=0.0)
        # Nothing is divided by zero where there is neither curvature nor damping.
        floor = (torch.finfo(matrix.dtype).eps * values.amax(1) + 1e-30).unsqueeze(1)
        added = damping.unsqueeze(1)
        damped = (values + added).maximum(floor), (rest.unsqueeze(1) + added).maximum(floor)
        return rows.contiguous(), *damped

    def _exact(self, dim: int) -> bool:
        return dim < 3 * (self.rank + _MORE)

    def _sketched(self, matrix: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Eigenvalues ``[b, k]`` and eigenvectors as rows ``[b, k, d]``. The random numbers are the
        same at every call, so that a run repeats itself on any rank."""
        b, d, _ = matrix.shape
        generator = torch.Generator().manual_seed(d)
        start = torch.randn(d, k + _MORE, generator=generator, dtype=torch.float64).to(matrix)
        span: Tensor = matrix @ start.expand(b, -1, -1)
        for _ in range(self.products):
            span = matrix @ torch.linalg.qr(span)[0]
        basis: Tensor = torch.linalg.qr(span)[0]
        values, inside = torch.linalg.eigh(basis.mT @ (matrix @ basis))
        return values[:, _MORE:], (basis @ inside[:, :, _MORE:]).mT

    def shapes(self, spec: FactorSpec) -> tuple[tuple[int, ...], ...]:
        k = min(self.rank, spec.dim)
        return (spec.batch, k, spec.dim), (spec.batch, k), (spec.batch, 1)

    def solve(self, parts: Parts, m: Tensor) -> Tensor:
        return self.apply_power(parts, m, -1.0)

    def apply_power(self, parts: Parts, m: Tensor, exponent: float) -> Tensor:
        rows, values, rest = parts  # [b, k, d], [b, k], [b, 1]
        outside = rest.pow(exponent)
        within = (values.pow(exponent) - outside).unsqueeze(-1) * (rows @ m)
        return torch.baddbmm(outside.unsqueeze(-1) * m, rows.mT, within)

    def cost(self, spec: FactorSpec) -> FactorCost:
        if spec.diagonal:
            return super().cost(spec)
        k = min(self.rank, spec.dim)
        if self._exact(spec.dim):
            by = Routine.EIGEN
            return FactorCost(spec.batch * by.operations(spec.dim), 4.0 * k, by)
        # Products with the factor, and of each span an orthonormal basis.
        wide = k + _MORE
        each = 2.0 * spec.dim**2 * wide + 4.0 * spec.dim * wide**2
        total = (self.products + 2) * each + Routine.EIGEN.operations(wide)
        return FactorCost(spec.batch * total, 4.0 * k)

    def workspace(self, spec: FactorSpec) -> int:
        if spec.diagonal or self._exact(spec.dim):
            return super().workspace(spec)
        wide = min(self.rank, spec.dim) + _MORE
        return spec.batch * (spec.dim**2 + 4 * spec.dim * wide)
