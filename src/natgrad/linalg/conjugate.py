"""Linear systems by preconditioned conjugate gradients, several right-hand sides at once.

(A + damping I) x = b,    minimises xᵀ (A + damping I) x / 2 - bᵀ x over a growing Krylov space
"""

import torch
from torch import Tensor

from natgrad.errors import SettingError
from natgrad.linalg.matrix import Matrix, Product, at_least, columns_of, tolerance_of
from natgrad.linalg.results import Solution

# How often a residual may turn out larger than its recursion says before it is left at that.
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
    matrix = Matrix(product, n, b.dtype, b.device)
    inverse = Matrix(preconditioner, n, b.dtype, b.device) if preconditioner else None
    first = None if start is None else columns_of("start", start).to(matrix.dtype)
    run = _Run(matrix, inverse, columns.to(matrix.dtype), damping, first)
    tolerance = tolerance_of(tolerance, matrix)
    iterations = run.go(tolerance, at_least("limit", limit, 1))
    return Solution(
        (run.x[:, 0] if b.dim() == 1 else run.x).to(b.dtype),
        run.residuals,
        bool((run.residuals <= tolerance).all()),
        matrix.products,
        f"conjugate gradients{' with a preconditioner' * (inverse is not None)}, "
        f"{iterations} iterations{run.note(limit if iterations >= limit else None)}",
    )


class _Run:
    """``x``, the residuals ``r`` and the directions ``p``, all ``[n, k]``; ``going`` the columns
    that are still worked on."""

    def __init__(
        self,
        matrix: Matrix,
        inverse: Matrix | None,
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
        self.going = self.norms.nonzero()[:, 0]
        self.residuals = (self.norms > 0).to(b.dtype)
        self.bent: dict[int, float] = {}
        self.skewed: list[int] = []
        self.stuck = False
        if start is not None and len(self.going):
            self._multiply_out(self.going)
        self.p = torch.zeros_like(b)
        self.rz = torch.zeros_like(self.norms)
        self.tries = torch.zeros_like(self.norms)

    def go(self, tolerance: float, limit: int) -> int:
        """Iterate until every column has ended; the number of iterations."""
        self._end(tolerance, checked=self.going)
        fresh = self.going
        iterations = 0
        while len(self.going) and iterations < limit:
            self._turn(fresh)
            self._advance()
            iterations += 1
            near = self.going[
                self.r[:, self.going].norm(dim=0) <= tolerance * self.norms[self.going]
            ]
            if len(near):
                self._multiply_out(near)
                self.tries[near] += 1
            fresh = near
            self._end(tolerance, checked=near)
        if len(self.going):
            self._multiply_out(self.going)
        return iterations

    def note(self, limit: int | None) -> str:
        """What kept columns from converging."""
        found = ""
        if self.bent:
            column, value = min(self.bent.items(), key=lambda item: item[1])
            found += (
                f"; the matrix is not positive definite: pᵀAp/pᵀp = {value:.2g} in column "
                f"{column}, {len(self.bent)} stopped so; use more damping"
            )
        if self.skewed:
            found += f"; the preconditioner is not positive definite in column {self.skewed[0]}"
        if self.stuck:
            found += "; rounding keeps the residual above the tolerance"
        if limit is not None and len(self.going):
            found += f"; stopped at the limit of {limit}"
        return found

    def _turn(self, fresh: Tensor) -> None:
        """New directions; ``fresh`` columns start over with the gradient."""
        r = self.r[:, self.going]
        z = self.inverse(r) if self.inverse else r
        rz = (r * z).sum(0)
        ratio = rz / self.rz[self.going]
        ratio[torch.isin(self.going, fresh)] = 0.0
        bad = rz <= 0
        self.skewed += self.going[bad].tolist()
        self.p[:, self.going] = z + ratio * self.p[:, self.going]
        self.rz[self.going] = rz
        if bool(bad.any()):
            self._leave(bad)

    def _advance(self) -> None:
        """The step along each direction that minimises the quadratic function."""
        if not len(self.going):
            return
        p = self.p[:, self.going]
        ap = self.matrix(p) + self.damping * p
        curved = (p * ap).sum(0)
        bad = curved <= 0
        if bool(bad.any()):
            ratios = curved / p.square().sum(0)
            for i in bad.nonzero()[:, 0].tolist():
                self.bent[int(self.going[i])] = float(ratios[i])
            p, ap, curved = p[:, ~bad], ap[:, ~bad], curved[~bad]
            self._leave(bad)
        step = self.rz[self.going] / curved
        self.x[:, self.going] += step * p
        self.r[:, self.going] -= step * ap

    def _leave(self, which: Tensor) -> None:
        """Columns end where they are, with a residual that is multiplied out."""
        self._multiply_out(self.going[which])
        self.going = self.going[~which]

    def _multiply_out(self, columns: Tensor) -> None:
        """The true residuals of some columns, in place of those carried along."""
        x = self.x[:, columns]
        if bool(x.any()):
            self.r[:, columns] = self.b[:, columns] - self.matrix(x) - self.damping * x
        self.residuals[columns] = self.r[:, columns].norm(dim=0) / self.norms[columns]

    def _end(self, tolerance: float, checked: Tensor) -> None:
        """Let go of those whose true residual is small, or will not become so."""
        if not len(checked):
            return
        good = self.residuals[checked] <= tolerance
        tired = ~good & (self.tries[checked] >= _TRIES)
        self.stuck |= bool(tired.any())
        self.going = self.going[~torch.isin(self.going, checked[good | tired])]
