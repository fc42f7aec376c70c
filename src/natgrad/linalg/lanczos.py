"""The largest or smallest eigenvalues of a symmetric matrix, by Lanczos without a restart.

    A Q_e = Q H,    Q_eᵀ A Q_e y = θ y,    ‖A v - θ v‖ = ‖H y - θ y‖

One start vector meets every eigenvalue once: of a multiple one it sees a single direction. Once all
wanted pairs have converged, a random vector orthogonal to everything seen is sent after them. After
``j`` steps its component ``c`` along an eigenvector that was missed, to an eigenvalue ``λ``, obeys

    |c| <= Π β_i / Π |λ - θ_i|      (β, θ of its own tridiagonal matrix)

so it stops when a missed one would be an improbable accident. If it has found something, another
vector follows it.
"""

from itertools import pairwise
from math import log

import torch
from torch import Tensor

from natgrad.linalg.krylov import Space
from natgrad.linalg.matrix import Matrix, Product, at_least, generator_of, tolerance_of
from natgrad.linalg.results import Eigenpairs

# Numbers kept in the basis before it is compressed.
_KEPT = 1 << 28
# A random unit vector has a component below _RARE / √n along a given one in 1% of all cases.
_RARE = 0.0125
# Ritz values that many tolerances away from a wanted one stand for a copy of it.
_NEAR = 10
# Columns a search for copies should have room for.
_ROOM = 24


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
    in 2^28 numbers), ``block`` the number of vectors that are multiplied together: more of them
    cost more products but fewer calls. If ``k > n``, there are ``n`` pairs.
    """
    sign = -1.0 if smallest else 1.0
    matrix = Matrix(lambda x: sign * product(x), n, dtype, device)
    wanted = min(at_least("k", k, 1), n)
    limit = max(1000, 20 * wanted) if limit is None else at_least("limit", limit, 1)
    least = 2 * wanted + at_least("block", block, 1) + 2
    if basis is None:
        basis = max(least + 8, min(10 * wanted + 200, _KEPT // n))
    search = _Search(matrix, wanted, min(n, max(least, at_least("basis", basis, 1))), block, seed)
    note = search.run(tolerance_of(tolerance, matrix), limit)

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


class _Search:
    """A Krylov space, the wanted Ritz pairs in it, and the chain sent after missed copies."""

    def __init__(self, matrix: Matrix, wanted: int, capacity: int, block: int, seed: int) -> None:
        self.matrix, self.wanted, self.capacity, self.block = matrix, wanted, capacity, block
        self.space = Space(matrix, capacity)
        self.generator = generator_of(seed)
        self.chain: list[int] = []
        self.restarts = 0
        for vector in matrix.gaussians(min(block, matrix.n), self.generator).T:
            self.space.append(vector)

    def run(self, tolerance: float, limit: int) -> str:
        """Expand until done; what is to be said about the end."""
        self.tolerance = tolerance
        self.space.expand(list(self.space.pending))
        while True:
            self._look()
            done = self._converged()
            if self.chain:
                if self._complete():
                    self.chain = []
                    if done and not self._found():
                        return self._story()
                elif self.space.size + 1 > self.capacity < self.matrix.n:
                    return self._story() + "; the basis is too small to exclude further copies"
            elif done and self._alone():
                return self._story()
            following = self._next_of_chain() if done or self.chain else self._best()
            if not following:
                return self._story()
            if self.matrix.products + len(following) > limit:
                return self._story() + (
                    f"; further copies were not excluded within {limit} products"
                    if done
                    else f"; stopped at the limit of {limit} products"
                )
            self._expand(following)

    def _look(self) -> None:
        """Ritz pairs of the whole space."""
        self.values, self.coefficients, rest = self.space.ritz()
        self.scale = float(self.values.abs().max())
        self.rest = rest[:, : self.wanted] / (self.scale or 1.0)
        self.residuals = self.rest.norm(dim=0)
        # Along rows that were multiplied, an exactly symmetric product leaves nothing.
        noise = self.rest[self.space.expanded].norm(dim=0)
        self.missing = self.rest[self.space.pending].norm(dim=0) > noise.clamp_min(self.tolerance)

    def _converged(self) -> bool:
        """Whether all wanted pairs are as good as the tolerance asks or the products allow."""
        return len(self.values) >= self.wanted and not bool(self.missing.any())

    def _best(self) -> list[int]:
        """The pending rows that most is missing of in the wanted pairs; a random one if none."""
        space = self.space
        if not space.pending:
            return self._random()
        missing = self.rest[space.pending][:, self.missing].norm(dim=1)
        first = missing.argsort(descending=True)[: self.block]
        return [space.pending[i] for i in first.tolist()]

    def _random(self) -> list[int]:
        """A random row orthogonal to all; none if they already span everything."""
        if self.space.size >= self.matrix.n:
            return []
        index = self.space.append(self.matrix.gaussians(1, self.generator)[:, 0])
        return [] if index is None else [index]

    def _alone(self) -> bool:
        """Whether nothing is left, or no wanted value of which a copy would change anything.

        Those are the ones above the last: a copy of that one would only take its place.
        """
        everything = not self.space.pending and self.space.size == self.matrix.n
        wanted = self.values[: self.wanted]
        return everything or float(wanted[0] - wanted[-1]) <= self.tolerance * self.scale

    def _found(self) -> bool:
        """Whether the chain has brought something new to the wanted values."""
        gain = self.values[: self.wanted] - self.before
        return float(gain.max()) > self.tolerance * self.scale

    def _complete(self) -> bool:
        """Whether the chain has, of each value that counts, found a copy or no probable part."""
        last = self.values[self.wanted - 1]
        above = self.before[self.before > last + self.tolerance * self.scale]
        seen = [i for i in self.chain if i in self.space.expanded]
        if seen == self.chain:
            return True
        if not seen:
            return False
        images = self.space.images
        distances = (above[:, None] - torch.linalg.eigvalsh(images[seen][:, seen])).abs()
        betas = torch.stack([images[j, i] for i, j in pairwise(self.chain)]).log().sum()
        bounds = betas - distances.log().sum(1)
        excluded = bounds <= log(_RARE) - log(self.matrix.n) / 2
        return bool(
            (excluded | (distances.min(1).values <= _NEAR * self.tolerance * self.scale)).all()
        )

    def _next_of_chain(self) -> list[int]:
        """The row that continues the chain, or begins a new one."""
        if not self.chain:
            room = min(_ROOM, self.capacity - self.wanted - 2)
            if self.capacity - self.space.size < room and self.capacity < self.matrix.n:
                self._compress(self.wanted + 1)
            self.chain, self.before = self._random(), self.values[: self.wanted]
        return self.chain[-1:]

    def _expand(self, indices: list[int]) -> None:
        if self.space.size + len(indices) > self.capacity < self.matrix.n and not self.chain:
            places = [self.space.pending.index(i) for i in indices]
            self._compress(self.wanted + (self.capacity - self.wanted) // 2)
            indices = [self.space.pending[place] for place in places]
        for index, born in zip(indices, self.space.expand(indices), strict=True):
            if born is not None and index in self.chain[-1:]:
                self.chain.append(born)

    def _compress(self, keep: int) -> None:
        self.space.compress(keep)
        self.restarts += 1

    def _story(self) -> str:
        several = "s" * (self.restarts > 1)
        story = f", {self.restarts} thick restart{several}" if self.restarts else ""
        if self._converged() and bool((self.residuals > self.tolerance).any()):
            story += f"; products are symmetric only to {float(self.residuals.max()):.0e}"
        return story
