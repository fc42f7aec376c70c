"""How a trace is estimated, and how eigenvalues are found, as objects to choose from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from natgrad.linalg import lanczos, lobpcg, traces
from natgrad.linalg.matrix_free import Product
from natgrad.linalg.results import Eigenpairs, Number

if TYPE_CHECKING:
    from natgrad.operators.base import Operator


class Estimator(ABC):
    """Of a trace; the result carries its standard error."""

    @abstractmethod
    def __call__(self, product: Product, n: int, **like: Any) -> Number: ...


@dataclass(frozen=True)
class Hutchinson(Estimator):
    """``mean zᵀ A z`` over random signs: the error falls as ``samples^-½``.

    Arguments:
        samples: number of random vectors, at least 2, each one product with the matrix; with ``P``
            or more the trace is exact.
        seed: of the random numbers; the same seed gives the same result.
    """

    samples: int = 100
    seed: int = 0

    def __call__(self, product: Product, n: int, **like: Any) -> Number:
        return traces.hutchinson(product, n, self.samples, seed=self.seed, **like)


@dataclass(frozen=True)
class HutchPP(Estimator):
    """Hutch++: the trace on the range of a few products exactly, that of the rest by Hutchinson.
    Better than Hutchinson for spectra that decay (Meyer et al. 2021).

    Arguments:
        products: number of products with the matrix, at least 6: a third finds the range, a third
            is the trace on it, a third the rest. With ``P`` or more the trace is exact.
        seed: of the random numbers; the same seed gives the same result.
    """

    products: int = 99
    seed: int = 0

    def __call__(self, product: Product, n: int, **like: Any) -> Number:
        return traces.hutchpp(product, n, self.products, seed=self.seed, **like)


@dataclass(frozen=True)
class XTrace(Estimator):
    """As Hutch++, but every random vector serves both purposes (Epperly et al. 2024).

    Arguments:
        products: number of products with the matrix, at least 6, two for each random vector; with
            ``P`` or more the trace is exact.
        seed: of the random numbers; the same seed gives the same result.
    """

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
    """The Lanczos method with full reorthogonalisation.

    Eigenvalues are right to about the square of the tolerance over their relative gap, and products
    in float32 know their direction to some 1e-5.

    Arguments:
        tolerance: bound on the residual ``|A v - λ v| / max|λ|`` of every eigenpair, between 0 and
            1; not below 16 roundings of the dtype.
        limit: largest number of products; ``None`` is 1000, or ``20 k`` if that is more.
        seed: of the starting vector.
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
    """A preconditioned block method, worth it for the smallest eigenvalues with a structured
    operator as preconditioner (Hetmaniuk and Lehoucq 2006).

    Arguments:
        tolerance: bound on the residual ``|A v - λ v| / max|λ|`` of every eigenpair, between 0 and
            1; not below 16 roundings of the dtype.
        limit: largest number of iterations, each of about ``k`` products.
        seed: of the starting block.
        preconditioner: an operator with a structure that is close to the matrix, for the smallest
            eigenvalues; ``None`` uses none.
        damping: ``≥ 0``, added to the preconditioner's eigenvalues before it is inverted; ignored
            without one.
    """

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
