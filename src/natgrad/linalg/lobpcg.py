"""Eigenpairs by a preconditioned block method (LOBPCG): Rayleigh-Ritz on ``[X, M⁻¹ R, P]``.

    R = A X - X Θ,    X⁺ = S C for the best eigenvectors C of Sᵀ A S,    P = X⁺ without X

``S`` is orthonormal in every iteration, and so is ``P`` against ``X⁺`` by construction (Hetmaniuk
and Lehoucq 2006). It pays where there is a good preconditioner, for the smallest
eigenvalues above all; without one, Lanczos needs fewer.
"""

import torch
from torch import Tensor

from natgrad.linalg.krylov import orthogonalise
from natgrad.linalg.matrix_free import MatrixFree, Product, at_least, generator_of, tolerance_of
from natgrad.linalg.results import Eigenpairs


def eigenpairs(
    product: Product,
    n: int,
    k: int,
    *,
    smallest: bool = False,
    preconditioner: Product | None = None,
    tolerance: float = 1e-5,
    limit: int = 500,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Eigenpairs:
    """The ``k`` algebraically largest (or smallest) pairs of ``A [n, n]``, multiple ones included.

    ``preconditioner`` maps residuals ``[n, k]`` to directions: an approximate inverse of ``A`` for
    the smallest, of ``λ - A`` for the largest, symmetric positive definite. ``tolerance`` bounds
    ``‖A v - λ v‖ / max|λ|``, ``limit`` the iterations. If ``k > n``, there are ``n`` pairs.
    """
    sign = -1.0 if smallest else 1.0
    matrix = MatrixFree(lambda x: sign * product(x), n, dtype, device)
    # It is not a product with A: it is checked like one, but counted apart.
    directions = MatrixFree(preconditioner, n, dtype, device) if preconditioner else None
    wanted = min(at_least("k", k, 1), n)
    at_least("limit", limit, 1)
    # A few more than asked for: the last wanted pair converges as its distance to the first that
    # is left out allows.
    width = min(n, wanted + max(2, wanted // 4))
    block = _Block(matrix, _independent([], matrix.gaussians(width, generator_of(seed))))
    tolerance = tolerance_of(tolerance, matrix)
    fresh, iterations = True, 0
    while True:
        rest, residuals = block.residuals()
        done = bool((residuals[:wanted] <= tolerance).all())
        if done and fresh:
            break
        new = rest.new_empty(n, 0)
        if not done and iterations < limit:
            rest = rest[:, (residuals > tolerance).to(rest.device)]
            new = block.outside(directions(rest) if directions else rest)
        if new.shape[1]:
            block.improve(new)
            fresh, iterations = False, iterations + 1
        elif fresh:
            break
        else:
            # Products were carried along by linear combinations; the last word is a true one.
            block.refresh()
            fresh = True

    values = sign * block.values[:wanted]
    order = values.argsort(descending=True)
    there = order.to(matrix.device)
    return Eigenpairs(
        values[order].to(matrix.device, matrix.dtype),
        block.x[:, :wanted][:, there],
        residuals[:wanted][order].to(matrix.device, matrix.dtype),
        done,
        matrix.products,
        f"LOBPCG{' with a preconditioner' * (directions is not None)}, {iterations} iterations",
    )


class _Block:
    """``x [n, b]`` and the directions ``p [n, c]`` they came along, orthonormal, with products."""

    def __init__(self, matrix: MatrixFree, x: Tensor) -> None:
        self.matrix, self.x, self.ax = matrix, x, matrix(x)
        self.p, self.ap = x[:, :0], x[:, :0]
        # Norms of products with unit vectors: none is larger than the largest eigenvalue.
        self.scale = float(self.ax.norm(dim=0).max())
        self._rotate(x.shape[1])

    def residuals(self) -> tuple[Tensor, Tensor]:
        """``A X - X Θ [n, b]`` and its norms over the largest eigenvalue met, ``[b]``."""
        rest = self.ax - self.x * self.values.to(self.x)
        norms = rest.norm(dim=0).cpu().double()
        return rest, norms / self.scale if self.scale > 0 else norms

    def outside(self, directions: Tensor) -> Tensor:
        """An orthonormal basis ``[n, ≤ b]`` of what they add to ``X`` and ``P``."""
        return _independent([self.x, self.p], directions)

    def improve(self, new: Tensor) -> None:
        """Rayleigh-Ritz on ``[X, new, P]``."""
        width = self.x.shape[1]
        self.x, self.ax = (
            torch.cat([self.x, new, self.p], 1),
            torch.cat([self.ax, self.matrix(new), self.ap], 1),
        )
        self._rotate(width)

    def refresh(self) -> None:
        """Multiply ``X`` anew, and forget where it came from."""
        self.ax = self.matrix(self.x)
        self.p, self.ap = self.x[:, :0], self.x[:, :0]
        self._rotate(self.x.shape[1])

    def _rotate(self, width: int) -> None:
        """The best ``width`` Ritz pairs of all columns; the first ones are the old ``X``."""
        projected = (self.x.T @ self.ax).cpu().double()
        values, vectors = torch.linalg.eigh((projected + projected.T) / 2)
        self.scale = max(self.scale, float(values.abs().max()))
        self.values, best = values.flip(0)[:width], vectors.flip(1)[:, :width]
        moved = best.clone()
        moved[:width] = 0.0
        moved = _independent([best], moved)
        basis, products = self.x, self.ax
        self.x, self.ax = basis @ best.to(basis), products @ best.to(basis)
        self.p, self.ap = basis @ moved.to(basis), products @ moved.to(basis)


def _independent(known: list[Tensor], columns: Tensor) -> Tensor:
    """An orthonormal basis of ``columns [n, b]`` without what ``known`` orthonormal ones span."""
    rows = torch.cat([*known, columns[:, :0]], 1).T.contiguous()
    before = len(rows)
    for column in columns.T:
        if len(rows) == columns.shape[0] or not bool(column.any()):
            continue
        rest, _, norm = orthogonalise(rows, column / column.norm())
        # Smaller remainders are mostly rounding; what is in them comes again in the next iteration.
        if norm > 1e3 * torch.finfo(columns.dtype).eps:
            rows = torch.cat([rows, rest[None] / norm])
    return rows[before:].T
