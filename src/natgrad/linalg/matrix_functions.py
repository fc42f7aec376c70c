"""Functions of a symmetric matrix times vectors, by Lanczos: ``f(A) v = ‖v‖ Q f(T) e₁``.

The error is judged by what the last steps have changed, continued as a geometric series whose ratio
comes from the last half of them.
"""

from collections.abc import Callable
from math import inf

import torch
from torch import Tensor

from natgrad.errors import SettingError
from natgrad.linalg.krylov import Chains
from natgrad.linalg.matrix_free import MatrixFree, Product, at_least, columns_of, tolerance_of
from natgrad.linalg.results import Solution

# Numbers in the bases of the columns that run together.
_TOGETHER = 1 << 27
# Looks at the change in one doubling of the steps.
_LOOKS = 16
# Steps before which nothing can be said.
_FEWEST = 4


def apply(
    function: Callable[[Tensor], Tensor],
    product: Product,
    v: Tensor,
    *,
    tolerance: float = 1e-6,
    limit: int = 200,
) -> Solution:
    """``f(A) v`` for ``v [n]`` or ``[n, k]``; ``function`` takes eigenvalues elementwise, float64.

    ``limit`` is the largest number of products for each column, and of vectors kept for it.
    ``residuals [k]`` are estimates of the relative error.
    """
    columns = columns_of("v", v)
    n, count = columns.shape
    matrix = MatrixFree(product, n, v.dtype, v.device)
    tolerance = tolerance_of(tolerance, matrix)
    steps = min(at_least("limit", limit, 1), n)
    x = torch.zeros(n, count, dtype=matrix.dtype, device=matrix.device)
    errors = torch.zeros(count, dtype=torch.float64)
    together = max(1, _TOGETHER // (n * steps))
    for first in range(0, count, together):
        chains = Chains(matrix, columns[:, first : first + together].to(matrix.dtype), steps)
        columns_here = [_Column(function, chains, i) for i in range(len(chains.bases))]
        while chains.active:
            chains.step()
            for column in columns_here:
                column.judge_error()
            chains.active = [i for i in chains.active if columns_here[i].error > tolerance]
        for i, column in enumerate(columns_here):
            x[:, first + i] = column.vector()
            errors[first + i] = column.error
    converged = bool((errors <= tolerance).all())
    return Solution(
        (x[:, 0] if v.dim() == 1 else x).to(v.dtype),
        errors.to(v.device, matrix.dtype),
        converged,
        matrix.products,
        "Lanczos approximation" + ("" if converged else f"; stopped at the limit of {steps} steps"),
    )


def power(
    product: Product,
    v: Tensor,
    exponent: float,
    *,
    damping: float = 0.0,
    tolerance: float = 1e-6,
    limit: int = 200,
) -> Solution:
    """``(A + damping I)^exponent v`` for ``v [n]`` or ``[n, k]``.

    Eigenvalues that are negative by no more than rounding count as zero.
    """
    rounding = 64 * torch.finfo(v.dtype).eps
    whole = float(exponent).is_integer()

    def function(values: Tensor) -> Tensor:
        shifted = values + damping
        size = float(shifted.abs().max())
        lowest = shifted[shifted.abs().argmin()] if whole else shifted.min()
        if (exponent < 0 and abs(float(lowest)) <= rounding * size) or (
            not whole and float(lowest) < -rounding * size
        ):
            raise SettingError(
                f"The power {exponent:g} is not defined at {float(lowest):.6g}, which is among the "
                f"eigenvalues plus the damping {damping:g}: use more damping."
            )
        return shifted**exponent if whole else shifted.clamp_min(0.0) ** exponent

    return apply(function, product, v, tolerance=tolerance, limit=limit)


class _Column:
    """One chain: its coefficients ``f(T) e₁`` so far, and the estimate of their error."""

    def __init__(self, function: Callable[[Tensor], Tensor], chains: Chains, index: int) -> None:
        self.function, self.chains, self.index = function, chains, index
        self.coefficients = torch.zeros(0, dtype=torch.float64)
        self.changes: list[tuple[int, float]] = []
        self.error = inf if float(chains.norms[index]) > 0 else 0.0

    def judge_error(self) -> None:
        """Judge the error, every few steps and at the end of the chain."""
        length, seen = self.chains.length(self.index), len(self.coefficients)
        ended = self.index not in self.chains.active
        if length == seen or (length - seen <= length // _LOOKS and not ended):
            return
        values, vectors = self.chains.decomposed(self.index, length)
        found = vectors @ (self.function(values) * vectors[0])
        if not bool(found.isfinite().all()):
            raise SettingError(
                f"The function is not finite on the eigenvalues from {float(values[0]):.6g} to "
                f"{float(values[-1]):.6g}: add damping to it."
            )
        change = found.clone()
        change[:seen] -= self.coefficients
        self.changes.append((length, float(change.norm()) / (length - seen)))
        self.coefficients = found
        self.error = 0.0 if self.chains.ended(self.index) else self._estimate(length)

    def _estimate(self, length: int) -> float:
        """What the steps to come would add: changes come in waves, so the largest ones count."""
        size = float(self.coefficients.norm())
        late = [change for step, change in self.changes if step > length * 3 // 4]
        early = [change for step, change in self.changes if length // 2 < step <= length * 3 // 4]
        if size == 0 or length < _FEWEST or not early:
            return inf
        if max(late) == 0:
            return 0.0
        if max(late) >= max(early):
            return inf
        ratio: float = (max(late) / max(early)) ** (4 / length)
        return max(late[-3:]) / (1 - ratio) / size

    def vector(self) -> Tensor:
        """``[n]``."""
        basis = self.chains.bases[self.index][: len(self.coefficients)]
        weights = self.coefficients * self.chains.norms[self.index]
        found: Tensor = basis.T @ weights.to(basis)
        return found
