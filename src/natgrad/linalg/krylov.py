"""Krylov spaces with full reorthogonalisation: a space that grows, and independent chains.

    A Q_e = Q H     Q orthonormal, Q_e those of its columns that were multiplied, H their images

This holds to rounding however the columns came in, so residuals of Ritz vectors are read from ``H``
alone, without products, even if the products are not quite symmetric.
"""

import torch
from torch import Tensor

from natgrad.linalg.matrix_free import MatrixFree

_PASSES = 4
_LAST = 2
# Of the norm: rounding along other rows is larger than that of a unit vector by its inverse.
_LEFT = 0.25


def orthogonalise(rows: Tensor, w: Tensor) -> tuple[Tensor, Tensor, float]:
    """``w [n]`` without its components along orthonormal ``rows [m, n]``, these, and the norm left.

    Gram-Schmidt is repeated until it no longer takes away most of what is left. What a chain has
    along its last two rows goes first, so that one pass over all of them is mostly enough.
    """
    components = torch.zeros(len(rows), dtype=w.dtype, device=w.device)
    norm = float(w.norm())
    if len(rows) > _LAST:
        components[-_LAST:] = rows[-_LAST:] @ w
        w = w - rows[-_LAST:].T @ components[-_LAST:]
    for _ in range(_PASSES):
        taken = rows @ w
        w = w - rows.T @ taken
        components += taken
        before, norm = norm, float(w.norm())
        if norm >= _LEFT * before:
            break
    return w, components, norm


class KrylovSpace:
    """Orthonormal ``rows [size, n]``; ``images [size, size]`` is ``H``, zero for pending rows.

    A pending row is one that was not yet multiplied. Small matrices are float64 on the CPU.
    """

    def __init__(self, matrix: MatrixFree, capacity: int) -> None:
        self.matrix, self.capacity = matrix, capacity
        self._rows = torch.empty(0, matrix.n, dtype=matrix.dtype, device=matrix.device)
        self._images = torch.zeros(0, 0, dtype=torch.float64)
        self.expanded: list[int] = []
        self.pending: list[int] = []
        self.scale = 0.0

    @property
    def size(self) -> int:
        return len(self.expanded) + len(self.pending)

    @property
    def rows(self) -> Tensor:
        return self._rows[: self.size]

    @property
    def images(self) -> Tensor:
        return self._images[: self.size, : self.size]

    def append(self, vector: Tensor) -> int | None:
        """Take in what is new in ``vector [n]``: its index, or None if nothing is."""
        rest, _, norm = orthogonalise(self.rows, vector / vector.norm())
        return self._push(rest / norm) if norm > 64 * self.matrix.precision else None

    def expand(self, indices: list[int]) -> list[int | None]:
        """Multiply pending rows; what is new in the image of each becomes pending, if anything."""
        products = self.matrix(self._rows[indices].T).T
        born: list[int | None] = []
        for index, image in zip(indices, products, strict=True):
            self.scale = max(self.scale, float(image.norm()))
            rest, components, norm = orthogonalise(self.rows, image)
            self.images[:, index] = components.cpu().double()
            self.pending.remove(index)
            self.expanded.append(index)
            # Less than this is rounding, not a direction.
            if norm <= 8 * self.matrix.precision * self.scale or self.size == self.matrix.n:
                born.append(None)
                continue
            new = self._push(rest / norm)
            self.images[new, index] = norm
            born.append(new)
        return born

    def ritz(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ritz values ``[m]``, descending, coefficients of the vectors ``[size, m]``, residuals.

        The residuals ``A v - θ v`` come as coefficients ``[size, m]`` too.
        """
        seen = self.images[:, self.expanded]
        projected = seen[self.expanded]
        values, small = torch.linalg.eigh((projected + projected.T) / 2)
        values, small = values.flip(0), small.flip(1)
        coefficients = torch.zeros(self.size, len(values), dtype=torch.float64)
        coefficients[self.expanded] = small
        return values, coefficients, seen @ small - coefficients * values

    def vectors(self, coefficients: Tensor) -> Tensor:
        """``[k, n]`` from coefficients ``[size, k]``."""
        return coefficients.to(self.rows).T @ self.rows

    def compress(self, keep: int) -> None:
        """Keep the first Ritz vectors and what is pending: a thick restart."""
        values, coefficients, residuals = self.ritz()
        keep = min(keep, len(values))
        rows = torch.cat([self.vectors(coefficients[:, :keep]), self.rows[self.pending]])
        images = torch.zeros(len(rows), len(rows), dtype=torch.float64)
        images[:keep, :keep] = values[:keep].diag()
        images[keep:, :keep] = residuals[self.pending, :keep]
        self._rows, self._images = rows, images
        self.expanded = list(range(keep))
        self.pending = list(range(keep, len(rows)))

    def _push(self, row: Tensor) -> int:
        size = self.size
        if size == len(self._rows):
            grown = max(size + 1, min(2 * size + 8, self.capacity + 1))
            rows = self._rows.new_empty(grown, self.matrix.n)
            images = torch.zeros(grown, grown, dtype=torch.float64)
            rows[:size], images[:size, :size] = self.rows, self.images
            self._rows, self._images = rows, images
        self._rows[size] = row
        self._images[size], self._images[:, size] = 0.0, 0.0
        self.pending.append(size)
        return size


class Chains:
    """Lanczos from each column of ``starts [n, p]``: ``A Q = Q T + β q eᵀ``, a basis for each.

    A chain ends early where its space is invariant; those that go on are multiplied together.
    """

    def __init__(self, matrix: MatrixFree, starts: Tensor, steps: int) -> None:
        self.matrix, self.steps = matrix, min(steps, matrix.n)
        self.norms = starts.norm(dim=0).cpu().double()
        # A float64 norm would promote the basis; norms of the work's dtype are what was divided by.
        units = starts / starts.norm(dim=0).clamp_min(torch.finfo(starts.dtype).tiny)
        self.bases = [
            torch.empty(self.steps, matrix.n, dtype=matrix.dtype, device=matrix.device)
            for _ in range(starts.shape[1])
        ]
        for basis, unit in zip(self.bases, units.T, strict=True):
            basis[0] = unit
        self.diagonals: list[list[float]] = [[] for _ in self.bases]
        self.offs: list[list[float]] = [[] for _ in self.bases]
        self.active = [i for i, norm in enumerate(self.norms.tolist()) if norm > 0]

    def step(self) -> None:
        """One product for each active chain."""
        last = [self.bases[i][len(self.diagonals[i])] for i in self.active]
        products = self.matrix(torch.stack(last, 1)).T
        still = []
        for i, image in zip(self.active, products, strict=True):
            length = len(self.diagonals[i]) + 1
            rest, components, norm = orthogonalise(self.bases[i][:length], image)
            self.diagonals[i].append(float(components[-1]))
            self.offs[i].append(norm)
            scale = max(map(abs, self.diagonals[i] + self.offs[i]))
            if norm > 8 * self.matrix.precision * scale and length < self.steps:
                self.bases[i][length] = rest / norm
                still.append(i)
        self.active = still

    def length(self, chain: int) -> int:
        return len(self.diagonals[chain])

    def ended(self, chain: int) -> bool:
        """Whether the chain's space is invariant, so that its quadrature is exact."""
        full = self.length(chain) == self.steps and self.steps < self.matrix.n
        return chain not in self.active and not full

    def decomposed(self, chain: int, length: int) -> tuple[Tensor, Tensor]:
        """Eigenvalues ``[m]`` and eigenvectors ``[m, m]`` of ``T`` after ``length`` steps."""
        diagonal = torch.tensor(self.diagonals[chain][:length], dtype=torch.float64)
        off = torch.tensor(self.offs[chain][: length - 1], dtype=torch.float64)
        values, vectors = torch.linalg.eigh(diagonal.diag() + off.diag(1) + off.diag(-1))
        return values, vectors
