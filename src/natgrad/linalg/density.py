"""The density of eigenvalues, and traces of functions, by stochastic Lanczos quadrature.

    tr f(A) = n E[Σ_j w_j f(θ_j)]     θ the eigenvalues of Lanczos' T from z/√n, w_j = (e₁ᵀ y_j)²

``z`` are random signs, one chain of Lanczos for each (Ubaru et al. 2017). A matrix that
has no more columns than the products to be spent is written down instead.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import hypot, pi, sqrt

import torch
from torch import Tensor

from natgrad.errors import SettingError
from natgrad.linalg.krylov import Chains
from natgrad.linalg.matrix_free import MatrixFree, Product, at_least, generator_of
from natgrad.linalg.results import Number

# Numbers in the bases of the chains that run together.
_TOGETHER = 1 << 27


@dataclass(frozen=True, slots=True, eq=False)
class Density:
    """Eigenvalues per unit of length at ``grid [g]``: ``values [g]``, which integrate to 1.

    ``standard_error [g]`` comes from the differences of the probes, ``width`` is the smoothing's.
    """

    grid: Tensor
    values: Tensor
    standard_error: Tensor
    width: float


@dataclass(frozen=True, slots=True, eq=False)
class Quadrature:
    """``nodes [p, m]`` and ``weights [p, m]`` of each probe, float64 on the CPU; rows sum to 1.

    ``shorter`` are those after half of the steps: the difference shows what further ones would do.
    """

    nodes: Tensor
    weights: Tensor
    shorter: tuple[Tensor, Tensor]
    n: int
    exact: bool
    products: int
    method: str

    def __repr__(self) -> str:
        low, high = float(self.nodes.min()), float(self.nodes.max())
        return f"Quadrature({low:.4g} to {high:.4g}; {self.method}, {self.products} products)"

    def trace(self, function: Callable[[Tensor], Tensor]) -> Number:
        """``tr f(A)``; ``function`` takes eigenvalues elementwise.

        The standard error holds the spread of the probes, and what the last half of the steps has
        changed.
        """
        each = self._sums(function, self.nodes, self.weights)
        mean = float(each.mean())
        if self.exact:
            return Number(mean, self.method, 0.0, self.products)
        change = mean - float(self._sums(function, *self.shorter).mean())
        error = hypot(float(each.std()) / sqrt(len(each)), change)
        return Number(mean, self.method, error, self.products)

    def density(self, points: int = 1000, width: float | None = None) -> Density:
        """Each node as a normal distribution of ``width`` (default: 1% of the spectrum's range)."""
        low, high = float(self.nodes.min()), float(self.nodes.max())
        if width is None:
            width = 0.01 * (high - low) or 0.01 * abs(high) or 0.01
        if not width > 0:
            raise SettingError(f"width is {width!r} but must be positive: give one or None.")
        grid = torch.linspace(
            low - 4 * width, high + 4 * width, at_least("points", points, 2), dtype=torch.float64
        )
        each = torch.stack(
            [
                torch.exp(-((grid[:, None] - nodes) / width).square() / 2) @ weights
                for nodes, weights in zip(self.nodes, self.weights, strict=True)
            ]
        ) / (width * sqrt(2 * pi))
        error = torch.zeros_like(grid) if self.exact else each.std(0) / sqrt(len(each))
        return Density(grid, each.mean(0), error, width)

    def _sums(self, function: Callable[[Tensor], Tensor], nodes: Tensor, weights: Tensor) -> Tensor:
        """``n Σ w f(θ)`` of each probe, ``[p]``."""
        values = function(nodes)
        bad = ~values.isfinite() & (weights > 0)
        if bool(bad.any()):
            raise SettingError(
                f"The function is {float(values[bad][0])} at the eigenvalue "
                f"{float(nodes[bad][0]):.6g} but must be finite there: add damping to it."
            )
        return self.n * torch.where(weights > 0, values * weights, 0.0).sum(1)


def quadrature(
    product: Product,
    n: int,
    *,
    probes: int = 8,
    steps: int = 64,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Quadrature:
    """Nodes and weights from ``probes`` chains of ``steps`` products each."""
    matrix = MatrixFree(product, n, dtype, device)
    at_least("probes", probes, 2)
    at_least("steps", steps, 1)
    if n <= probes * steps and matrix.small:
        nodes = torch.linalg.eigvalsh(matrix.dense())[None]
        rule = nodes, torch.full_like(nodes, 1 / n)
        return Quadrature(*rule, rule, n, True, matrix.products, "exact: all eigenvalues")
    generator = generator_of(seed)
    whole: list[tuple[Tensor, Tensor]] = []
    half: list[tuple[Tensor, Tensor]] = []
    together = max(1, _TOGETHER // (n * min(steps, n)))
    for first in range(0, probes, together):
        starts = matrix.signs(min(together, probes - first), generator)
        chains = Chains(matrix, starts, steps)
        while chains.active:
            chains.step()
        for chain in range(starts.shape[1]):
            length = chains.length(chain)
            short = length if chains.ended(chain) else max(1, length // 2)
            whole.append(_rule(chains, chain, length))
            half.append(_rule(chains, chain, short))
    nodes, weights = _stack(whole)
    return Quadrature(
        nodes,
        weights,
        _stack(half),
        n,
        False,
        matrix.products,
        f"Lanczos quadrature: {probes} probes of {min(steps, n)} steps",
    )


def logdet(
    product: Product,
    n: int,
    *,
    damping: float = 0.0,
    probes: int = 8,
    steps: int = 64,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Number:
    """``log det(A + damping I)`` of a matrix that is positive definite with its damping."""
    rule = quadrature(product, n, probes=probes, steps=steps, seed=seed, dtype=dtype, device=device)
    return logdet_of(rule, damping)


def logdet_of(rule: Quadrature, damping: float = 0.0) -> Number:
    """The same, from a quadrature that is there already."""
    lowest = float(rule.nodes.min())
    if lowest + damping <= 0:
        raise SettingError(
            f"log det needs a positive definite matrix, but {lowest:.6g} is among the eigenvalues "
            f"and damping is {damping!r}: give a damping above {max(-lowest, 0.0):.6g}."
        )
    return rule.trace(lambda values: (values + damping).log())


def _rule(chains: Chains, chain: int, length: int) -> tuple[Tensor, Tensor]:
    values, vectors = chains.decomposed(chain, length)
    return values, vectors[0].square()


def _stack(rules: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Rows of one length: shorter ones repeat their last node with weight 0."""
    length = max(len(values) for values, _ in rules)
    nodes = torch.stack([torch.cat([v, v[-1:].expand(length - len(v))]) for v, _ in rules])
    weights = torch.stack([torch.cat([w, w.new_zeros(length - len(w))]) for _, w in rules])
    return nodes, weights
