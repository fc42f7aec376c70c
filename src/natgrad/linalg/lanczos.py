"""The largest or smallest eigenvalues of a symmetric matrix, by Lanczos without a restart.

    A Q_e = Q H,    Q_eᵀ A Q_e y = θ y,    ‖A v - θ v‖ = ‖H y - θ y‖

One start vector meets every eigenvalue once: of a multiple one it sees a single direction. Once all
wanted pairs have converged, a random vector orthogonal to everything seen is sent after them. After
``j`` steps its component ``c`` along an eigenvector that was missed, to an eigenvalue ``λ``, obeys

    |c| <= Π β_i / Π |λ - θ_i|      (β, θ of its own tridiagonal matrix)

so it stops when a missed one would be an improbable accident. If it has found something, another
vector follows it.
"""

from math import log

import torch
from torch import Tensor

from natgrad.linalg.krylov import KrylovSpace, orthogonalise
from natgrad.linalg.matrix_free import MatrixFree, Product, at_least, generator_of, tolerance_of
from natgrad.linalg.results import Eigenpairs

# Numbers kept in the basis before it is compressed.
_KEPT = 1 << 27
# A random unit vector has a component below _RARE / √n along a given one in 1% of all cases.
_RARE = 0.0125
# Ritz values that many tolerances away from a wanted one stand for a copy of it.
_NEAR = 10
# Rows a chain after copies should have room for.
_ROOM = 24
# The squared part of a missed eigenvector that may lie along what its chain is orthogonal to.
_SAFE = 0.1
# A smaller component of a found vector can wait.
_ALONG = 0.01
# Less than this of a random vector is nothing but rounding.
_EMPTY = 1e-5


def eigenpairs(
    product: Product,
    n: int,
    k: int,
    *,
    smallest: bool = False,
    tolerance: float = 1e-5,
    limit: int | None = None,
    basis: int | None = None,
    block: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Eigenpairs:
    """The ``k`` algebraically largest (or smallest) pairs of ``A [n, n]``, multiple ones included.

    ``tolerance`` bounds ``‖A v - λ v‖ / max|λ|``; eigenvalues are then right to about its square
    over their relative gap. ``limit`` is the largest number of products (default 1000 or 20 k),
    ``basis`` the largest number of vectors kept before a thick restart (default: as many as fit
    in 2^27 numbers), ``block`` the number of vectors that are multiplied together: more of them
    cost more products but fewer calls. If ``k > n``, there are ``n`` pairs; a matrix with
    ``n <= 4 k + 32`` is written down and decomposed instead.
    """
    sign = -1.0 if smallest else 1.0
    matrix = MatrixFree(lambda x: sign * product(x), n, dtype, device)
    wanted = min(at_least("k", k, 1), n)
    limit = max(1000, 20 * wanted) if limit is None else at_least("limit", limit, 1)
    least = 2 * wanted + at_least("block", block, 1) + 2
    if basis is None:
        basis = max(least + 8, min(10 * wanted + 200, _KEPT // n))
    capacity = min(n, max(least, at_least("basis", basis, 1)))
    tolerance = tolerance_of(tolerance, matrix)
    if n <= 4 * wanted + 32:
        return _dense(matrix, wanted, sign)
    search = _Search(matrix, wanted, capacity, block, seed)
    note = search.run(tolerance, limit)

    count = min(wanted, len(search.values))
    vectors = search.space.vectors(search.coefficients[:, :count])
    values, residuals = sign * search.values[:count], search.residuals[:count]
    order = values.argsort(descending=True)
    vectors = (vectors / vectors.norm(dim=1, keepdim=True))[order.to(matrix.device)].T
    return Eigenpairs(
        values[order].to(matrix.device, matrix.dtype),
        vectors.contiguous(),
        residuals[order].to(matrix.device, matrix.dtype),
        count == wanted and bool((residuals <= search.tolerance).all()),
        matrix.products,
        f"Lanczos with full reorthogonalisation{note}",
    )


def _dense(matrix: MatrixFree, wanted: int, sign: float) -> Eigenpairs:
    """All of a matrix that has hardly more columns than a search would take products."""
    whole = matrix.dense()
    values, vectors = torch.linalg.eigh(whole)
    values, vectors = values.flip(0)[:wanted], vectors.flip(1)[:, :wanted]
    scale = float(torch.linalg.matrix_norm(whole, 2)) or 1.0
    residuals = (whole @ vectors - vectors * values).norm(dim=0) / scale
    order = (sign * values).argsort(descending=True)
    return Eigenpairs(
        (sign * values)[order].to(matrix.device, matrix.dtype),
        vectors[:, order].to(matrix.device, matrix.dtype),
        residuals[order].to(matrix.device, matrix.dtype),
        True,
        matrix.products,
        "exact: all eigenvalues",
    )


class _Search:
    """A Krylov space, the wanted Ritz pairs in it, and the vectors sent after missed copies."""

    def __init__(
        self, matrix: MatrixFree, wanted: int, capacity: int, block: int, seed: int
    ) -> None:
        self.matrix, self.wanted, self.capacity, self.block = matrix, wanted, capacity, block
        self.space = KrylovSpace(matrix, capacity)
        self.generator = generator_of(seed)
        self.restarts = 0
        for vector in matrix.gaussians(min(block, matrix.n), self.generator).T:
            self.space.append(vector)

    def run(self, tolerance: float, limit: int) -> str:
        """Expand until done; what is to be said about the end."""
        self.tolerance = tolerance
        following = list(self.space.pending)
        while following:
            if self.matrix.products + len(following) > limit:
                return f"{self._summary()}; stopped at the limit of {limit} products"
            self._expand(following)
            self._update_ritz_pairs()
            if not self._converged():
                following = self._best()
            elif self._alone():
                break
            else:
                chain = self._chain()
                if not chain.run(limit):
                    return f"{self._summary()}; further copies were not excluded"
                following = self._take(chain.found())
        return self._summary()

    def _update_ritz_pairs(self) -> None:
        """Ritz pairs of the whole space."""
        self.values, self.coefficients, rest = self.space.ritz()
        self.scale = float(self.values.abs().max())
        self.rest = rest / (self.scale or 1.0)
        self.residuals = self.rest[:, : self.wanted].norm(dim=0)
        # Along rows that were multiplied, an exactly symmetric product leaves nothing.
        noise = self.rest[self.space.expanded, : self.wanted].norm(dim=0)
        self.open = self.rest[self.space.pending].norm(dim=0)
        self.missing = self.open[: self.wanted] > noise.clamp_min(self.tolerance)

    def _converged(self) -> bool:
        """Whether all wanted pairs are as good as the tolerance asks or the products allow."""
        return len(self.values) >= self.wanted and not bool(self.missing.any())

    def _best(self) -> list[int]:
        """The pending rows that most is missing of in the wanted pairs; a random one if none."""
        space = self.space
        if not space.pending:
            if space.size == self.matrix.n:
                return []
            index = space.append(self.matrix.gaussians(1, self.generator)[:, 0])
            return [] if index is None else [index]
        missing = self.rest[space.pending, : self.wanted][:, self.missing].norm(dim=1)
        first = missing.argsort(descending=True)[: self.block]
        return [space.pending[i] for i in first.tolist()]

    def _alone(self) -> bool:
        """Whether nothing is left, or no wanted value of which a copy would change anything.

        Those are the ones above the last: a copy of that one would only take its place.
        """
        everything = not self.space.pending and self.space.size == self.matrix.n
        wanted = self.values[: self.wanted]
        return everything or float(wanted[0] - wanted[-1]) <= self.tolerance * self.scale

    def _chain(self) -> "_Chain":
        """A chain orthogonal to the wanted vectors and to others that are nearly eigenvectors.

        A missed eigenvector has a component of at most ``residual / (λ - θ)`` along a Ritz vector:
        those stay whose squares are a tenth together, for the fewer large eigenvalues are left the
        sooner the chain is through.
        """
        wanted = self.values[: self.wanted]
        values = wanted[wanted > wanted[-1] + self.tolerance * self.scale]
        components = (
            self.open[self.wanted :] * self.scale / (values[-1] - self.values[self.wanted :])
        )
        order = components.argsort()
        safe = order[components[order].square().cumsum(0) <= _SAFE] + self.wanted
        room = self.capacity if self.capacity < self.matrix.n else self.matrix.n + _ROOM
        safe = safe[: max(0, room - _ROOM - self.wanted)]
        kept = torch.cat([torch.arange(self.wanted), safe])
        rows = self.space.vectors(self.coefficients[:, kept])
        start = self.matrix.gaussians(1, self.generator)[:, 0]
        near = _NEAR * self.tolerance * self.scale
        return _Chain(self.matrix, rows, start, values, near, float(wanted[-1]), room)

    def _take(self, found: Tensor) -> list[int]:
        """Take in vectors ``[k, n]``: the pending rows they lie along, to be multiplied next."""
        for vector in found:
            self.space.append(vector)
        along = (self.space.rows[self.space.pending] @ found.T).abs() > _ALONG
        return [i for i, much in zip(self.space.pending, along, strict=True) if bool(much.any())]

    def _expand(self, indices: list[int]) -> None:
        if self.space.size + len(indices) > self.capacity < self.matrix.n:
            places = [self.space.pending.index(i) for i in indices]
            self.space.compress(self.wanted + (self.capacity - self.wanted) // 2)
            self.restarts += 1
            indices = [self.space.pending[place] for place in places]
        self.space.expand(indices)

    def _summary(self) -> str:
        several = "s" * (self.restarts > 1)
        summary = f", {self.restarts} thick restart{several}" if self.restarts else ""
        if self._converged() and bool((self.residuals > self.tolerance).any()):
            summary += f"; products are symmetric only to {float(self.residuals.max()):.0e}"
        return summary


class _Chain:
    """Lanczos from a random vector in the complement of ``kept [m, n]``, after missed copies."""

    def __init__(
        self,
        matrix: MatrixFree,
        kept: Tensor,
        start: Tensor,
        values: Tensor,
        near: float,
        last: float,
        room: int,
    ) -> None:
        self.matrix, self.values, self.near, self.last = matrix, values, near, last
        self.kept, self.room = len(kept), room
        rest, _, norm = orthogonalise(kept, start / start.norm())
        self._rows = kept  # with room for more, which is doubled when it is full
        self._length = len(kept)
        if norm > _EMPTY:
            self._push(rest / norm)
        self.diagonal: list[float] = []
        self.off: list[float] = []

    def run(self, limit: int) -> bool:
        """Go on until each value has a copy here, or no probable part in the chain's start."""
        while len(self.rows) > self.kept + len(self.diagonal):
            if self.matrix.products >= limit or len(self.rows) > self.room:
                return False
            image = self.matrix(self.rows[-1:].T)[:, 0]
            size = float(image.norm())
            rest, components, norm = orthogonalise(self.rows, image)
            self.diagonal.append(float(components[-1]))
            self.off.append(norm)
            if norm <= 8 * self.matrix.precision * size or self._through():
                break
            self._push(rest / norm)
        return True

    @property
    def rows(self) -> Tensor:
        return self._rows[: self._length]

    def _push(self, row: Tensor) -> None:
        if self._length == len(self._rows):
            grown = self._rows.new_empty(2 * self._length + 8, self._rows.shape[1])
            grown[: self._length] = self._rows
            self._rows = grown
        self._rows[self._length] = row
        self._length += 1

    def found(self) -> Tensor:
        """``[k, n]``, the vectors that belong among the wanted ones."""
        values, vectors = self._ritz()
        mine = vectors[:, values > self.last + self.near / _NEAR].to(self.rows)
        return mine.T @ self.rows[self.kept :]

    def _ritz(self) -> tuple[Tensor, Tensor]:
        off = torch.tensor(self.off[:-1], dtype=torch.float64)
        diagonal = torch.tensor(self.diagonal, dtype=torch.float64)
        values, vectors = torch.linalg.eigh(diagonal.diag() + off.diag(1) + off.diag(-1))
        return values, vectors

    def _through(self) -> bool:
        distances = (self.values[:, None] - self._ritz()[0]).abs()
        bounds = sum(map(log, self.off)) - distances.log().sum(1)
        excluded = bounds <= log(_RARE) - log(self.matrix.n) / 2
        copied = distances.min(1).values <= self.near
        return bool((excluded | copied).all())
