"""How a trace is estimated, and how eigenvalues are found, as objects to choose from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from natgrad.linalg import lanczos, lobpcg, traces
from natgrad.linalg.matrix import Product
from natgrad.linalg.results import Eigenpairs, Number

if TYPE_CHECKING:
    from natgrad.operators.base import Operator


class Estimator(ABC):
    """Of a trace; the result carries its standard error."""

    @abstractmethod
    def __call__(self, product: Product, n: int, **like: Any) -> Number: ...


@dataclass(frozen=True)
class Hutchinson(Estimator):
    """``mean zᵀ A z`` over random signs: the error falls as ``samples^-½``."""

    samples: int = 100
    seed: int = 0

    def __call__(self, product: Product, n: int, **like: Any) -> Number:
        return traces.hutchinson(product, n, self.samples, seed=self.seed, **like)


@dataclass(frozen=True)
class HutchPP(Estimator):
    """The range of a few products exactly, the rest by Hutchinson: better for decaying spectra."""

    products: int = 99
    seed: int = 0

    def __call__(self, product: Product, n: int, **like: Any) -> Number:
        return traces.hutchpp(product, n, self.products, seed=self.seed, **like)


@dataclass(frozen=True)
class XTrace(Estimator):
    """As Hutch++, with every vector serving both purposes."""

    products: int = 100
    seed: int = 0

    def __call__(self, product: Product, n: int, **like: Any) -> Number:
        return traces.xtrace(product, n, self.products, seed=self.seed, **like)


class Eigensolver(ABC):
    """Of the largest or smallest eigenvalues; the result carries residuals and convergence."""

    @abstractmethod
    def __call__(
        self, product: Product, n: int, k: int, smallest: bool, **like: Any
    ) -> Eigenpairs: ...


@dataclass(frozen=True)
class Lanczos(Eigensolver):
    """``tolerance`` bounds ``|A v - l v| / max|l|``, ``limit`` the products.

    Eigenvalues are right to about the square of the tolerance over their relative gap, and products
    in float32 know their direction to some 1e-5.
    """

    tolerance: float = 1e-4
    limit: int | None = None
    seed: int = 0

    def __call__(self, product: Product, n: int, k: int, smallest: bool, **like: Any) -> Eigenpairs:
        return lanczos.eigenpairs(
            product,
            n,
            k,
            smallest=smallest,
            tolerance=self.tolerance,
            limit=self.limit,
            seed=self.seed,
            **like,
        )


@dataclass(frozen=True)
class LOBPCG(Eigensolver):
    """A block method: for the smallest eigenvalues, with a structured operator in front of it."""

    tolerance: float = 1e-5
    limit: int = 500
    seed: int = 0
    preconditioner: Operator | None = None
    damping: float = 1e-3  # of the preconditioner

    def __call__(self, product: Product, n: int, k: int, smallest: bool, **like: Any) -> Eigenpairs:
        front = self.preconditioner
        return lobpcg.eigenpairs(
            product,
            n,
            k,
            smallest=smallest,
            preconditioner=None if front is None else lambda m: front.solve(m, self.damping),
            tolerance=self.tolerance,
            limit=self.limit,
            seed=self.seed,
            **like,
        )
