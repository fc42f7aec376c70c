"""Linear systems by preconditioned conjugate gradients, several right-hand sides at once.

(A + damping I) x = b,    minimises xᵀ (A + damping I) x / 2 - bᵀ x over a growing Krylov space

The residual that the iteration carries along drifts away from ``b - A x`` by rounding. A column is
therefore only called converged when its residual, multiplied out anew, is small.
"""

import torch
from torch import Tensor

from natgrad.errors import SettingError
from natgrad.linalg.matrix_free import MatrixFree, Product, at_least, columns_of, tolerance_of
from natgrad.linalg.results import Solution

# How often the true residual may be larger than the recursion says before the column stops.
_TRIES = 3


def solve(
    product: Product,
    b: Tensor,
    *,
    damping: float = 0.0,
    tolerance: float = 1e-5,
    limit: int = 1000,
    preconditioner: Product | None = None,
    start: Tensor | None = None,
) -> Solution:
    """``x`` with ``(A + damping I) x = b`` for ``b [n]`` or ``[n, k]``.

    ``tolerance`` bounds ``‖b - A x - damping x‖ / ‖b‖`` of each column, as multiplied out anew at
    its end; columns that have got there are not multiplied any more. ``preconditioner`` maps
    ``[n, k]`` to an approximate solution, symmetric positive definite; ``start`` is a first guess.
    A direction with ``pᵀ (A + damping I) p <= 0`` ends its column where it is: the matrix is not
    positive definite then, and ``method`` says so.
    """
    columns = columns_of("b", b)
    n = columns.shape[0]
    if damping < 0:
        raise SettingError(f"damping is {damping!r} but must not be negative: give 0 or more.")
    if start is not None and start.shape != b.shape:
        raise SettingError(
            f"start has shape {list(start.shape)} but b has {list(b.shape)}: give them the same."
        )
    if not bool(columns.isfinite().all()):
        raise SettingError("b has entries that are not finite: look for overflow or NaN in them.")
    matrix = MatrixFree(product, n, b.dtype, b.device)
    inverse = MatrixFree(preconditioner, n, b.dtype, b.device) if preconditioner else None
    first = None if start is None else columns_of("start", start).to(matrix.dtype)
    run = _Iteration(matrix, inverse, columns.to(matrix.dtype), damping, first)
    tolerance = tolerance_of(tolerance, matrix)
    iterations = run.iterate(tolerance, at_least("limit", limit, 1))
    return Solution(
        (run.x[:, 0] if b.dim() == 1 else run.x).to(b.dtype),
        run.residuals,
        bool((run.residuals <= tolerance).all()),
        matrix.products,
        f"conjugate gradients{' with a preconditioner' * (inverse is not None)}, "
        f"{iterations} iterations{run.note(limit if iterations >= limit else None)}",
    )


class _Iteration:
    """``x``, the residuals ``r`` and the directions ``p``, all ``[n, k]``; ``active`` the columns
    that are still worked on."""

    def __init__(
        self,
        matrix: MatrixFree,
        inverse: MatrixFree | None,
        b: Tensor,
        damping: float,
        start: Tensor | None,
    ) -> None:
        self.matrix, self.inverse, self.b, self.damping = matrix, inverse, b, damping
        self.norms = b.norm(dim=0)
        self.x = torch.zeros_like(b) if start is None else start.clone()
        # x = 0 solves a column of zeros, whatever the first guess is.
        self.x[:, self.norms == 0] = 0.0
        self.r = b.clone()
        self.active = self.norms.nonzero()[:, 0]
        self.residuals = (self.norms > 0).to(b.dtype)
        self.indefinite: dict[int, float] = {}
        self.bad_preconditioner: list[int] = []
        self.stalled = False
        if start is not None and len(self.active):
            self._true_residuals(self.active)
        self.p = torch.zeros_like(b)
        self.rz = torch.zeros_like(self.norms)
        self.tries = torch.zeros_like(self.norms)

    def iterate(self, tolerance: float, limit: int) -> int:
        """Iterate until every column has ended; the number of iterations."""
        self._stop_converged(tolerance, checked=self.active)
        fresh = self.active
        iterations = 0
        while len(self.active) and iterations < limit:
            self._new_directions(fresh)
            self._line_search()
            iterations += 1
            near = self.active[
                self.r[:, self.active].norm(dim=0) <= tolerance * self.norms[self.active]
            ]
            if len(near):
                self._true_residuals(near)
                self.tries[near] += 1
            fresh = near
            self._stop_converged(tolerance, checked=near)
        if len(self.active):
            self._true_residuals(self.active)
        return iterations

    def note(self, limit: int | None) -> str:
        """What kept columns from converging."""
        found = ""
        if self.indefinite:
            column, value = min(self.indefinite.items(), key=lambda item: item[1])
            found += (
                f"; the matrix is not positive definite: pᵀAp/pᵀp = {value:.2g} in column "
                f"{column}, {len(self.indefinite)} stopped so; use more damping"
            )
        if self.bad_preconditioner:
            column = self.bad_preconditioner[0]
            found += f"; the preconditioner is not positive definite in column {column}"
        if self.stalled:
            found += "; rounding keeps the residual above the tolerance"
        if limit is not None and len(self.active):
            found += f"; stopped at the limit of {limit}"
        return found

    def _new_directions(self, fresh: Tensor) -> None:
        """New search directions; ``fresh`` columns restart with the gradient."""
        r = self.r[:, self.active]
        z = self.inverse(r) if self.inverse else r
        rz = (r * z).sum(0)
        ratio = rz / self.rz[self.active]
        ratio[torch.isin(self.active, fresh)] = 0.0
        bad = rz <= 0
        self.bad_preconditioner += self.active[bad].tolist()
        self.p[:, self.active] = z + ratio * self.p[:, self.active]
        self.rz[self.active] = rz
        if bool(bad.any()):
            self._stop(bad)

    def _line_search(self) -> None:
        """The step along each direction that minimises the quadratic function."""
        if not len(self.active):
            return
        p = self.p[:, self.active]
        ap = self.matrix(p) + self.damping * p
        curved = (p * ap).sum(0)
        bad = curved <= 0
        if bool(bad.any()):
            ratios = curved / p.square().sum(0)
            for i in bad.nonzero()[:, 0].tolist():
                self.indefinite[int(self.active[i])] = float(ratios[i])
            p, ap, curved = p[:, ~bad], ap[:, ~bad], curved[~bad]
            self._stop(bad)
        step = self.rz[self.active] / curved
        self.x[:, self.active] += step * p
        self.r[:, self.active] -= step * ap

    def _stop(self, which: Tensor) -> None:
        """Stop these columns, with their true residuals."""
        self._true_residuals(self.active[which])
        self.active = self.active[~which]

    def _true_residuals(self, columns: Tensor) -> None:
        """Replace the recursive residuals of some columns by the true ones, ``b - A x``."""
        x = self.x[:, columns]
        if bool(x.any()):
            self.r[:, columns] = self.b[:, columns] - self.matrix(x) - self.damping * x
        self.residuals[columns] = self.r[:, columns].norm(dim=0) / self.norms[columns]

    def _stop_converged(self, tolerance: float, checked: Tensor) -> None:
        """Stop columns whose true residual is small, or does not become small."""
        if not len(checked):
            return
        good = self.residuals[checked] <= tolerance
        stalled = ~good & (self.tries[checked] >= _TRIES)
        self.stalled |= bool(stalled.any())
        self.active = self.active[~torch.isin(self.active, checked[good | stalled])]
