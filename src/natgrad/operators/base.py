"""A symmetric matrix over the parameters, known by its products: ``A @ v`` and what follows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import log
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from natgrad.errors import ConvergenceError, SettingError
from natgrad.linalg import conjugate, density, functions, traces
from natgrad.linalg.matrix import Product
from natgrad.linalg.results import Eigenpairs, Estimate, Number, Solution
from natgrad.operators import checks
from natgrad.operators.estimators import Eigensolver, Estimator, Lanczos
from natgrad.operators.powers import shifted_power
from natgrad.operators.problem import Problem
from natgrad.operators.progress import track
from natgrad.operators.space import Space
from natgrad.operators.spectrum import Spectrum
from natgrad.runtime.ranges import NOT_NEGATIVE, number

V = TypeVar("V", Tensor, dict[str, Tensor])
SMALL = 2048  # parameters of which a dense matrix is cheaper than an iteration
_PRODUCTS = 1 << 16  # more of them for one diagonal are a mistake
_NUMBERS = 1 << 24  # in vectors that are multiplied together
_TOLERANCE = 1e-10  # of solve(), relative; float32 stops at its own precision


class Operator(ABC):
    """``kind`` names it in print. ``definite``: no eigenvalue is below zero.

    Vectors are flat ``[P]``, several ``[P, k]``, or a dict by parameter name; the result is of the
    same kind. The matrix is that of the parameters as they are when it is used.
    """

    definite: bool = False
    closed: ClassVar[bool] = False  # whether functions of it are known without iterating

    def __init__(self, problem: Problem, kind: str, size: int | None = None) -> None:
        self.problem, self.kind = problem, kind
        self.space: Space | None = problem.space if size is None else None
        self.size = problem.space.size if size is None else size
        self.dtype, self.device = problem.dtype, problem.device

    @property
    def shape(self) -> tuple[int, int]:
        return self.size, self.size

    # Products.

    @abstractmethod
    def product(self, v: Tensor) -> Tensor:
        """``A v`` for ``v [P, k]``."""

    def __matmul__(self, v: V) -> V:
        found: V = self._like(v, self.product)
        return found

    def __add__(self, other: Operator) -> Operator:
        from natgrad.operators.algebra import Sum

        if not isinstance(other, Operator):
            return NotImplemented
        return Sum([(1.0, self), (1.0, other)])

    def __sub__(self, other: Operator) -> Operator:
        from natgrad.operators.algebra import Sum

        if not isinstance(other, Operator):
            return NotImplemented
        return Sum([(1.0, self), (-1.0, other)])

    def __mul__(self, factor: float) -> Operator:
        from natgrad.operators.algebra import Sum

        try:
            return Sum([(float(factor), self)])
        except (TypeError, ValueError):  # no number
            return NotImplemented

    __rmul__ = __mul__

    # Entries.

    def dense(self) -> Tensor:
        """``[P, P]``, if it is not too large."""
        checks.fits(self.size, self.size, self.dtype, self.kind, "use products, or a structure")
        return self._dense()

    def _dense(self) -> Tensor:
        found = self.product(torch.eye(self.size, dtype=self.dtype, device=self.device))
        return (found + found.mT) / 2

    def diagonal(self) -> Tensor:
        """``[P]``, exact: as many products as there are parameters, some at a time."""
        if self.size > _PRODUCTS:
            raise SettingError(
                f"The exact diagonal of {self.kind} takes {self.size:,} products, more than "
                f"{_PRODUCTS:,}: use estimated_diagonal(), trace(by=Hutchinson()) or a structure."
            )
        out = self._new(self.size)
        pieces = torch.arange(self.size, device=self.device).split(_NUMBERS // self.size + 1)
        for some in track(pieces, f"diagonal of {self.kind}", self.problem.progress):
            out[some] = self.columns(some)[some, some - some[0]]
        return out

    def columns(self, which: Tensor) -> Tensor:
        """``[P, k]``, those of the matrix at ``which [k]``."""
        ones = self._new(self.size, len(which))
        ones[which, torch.arange(len(which), device=self.device)] = 1.0
        return self.product(ones)

    def estimated_diagonal(self, samples: int = 100, seed: int = 0) -> Estimate:
        """``[P]`` from products with random signs, with the standard error of each entry."""
        return traces.diagonal(self.product, self.size, samples, seed=seed, **self._kind_of())

    def trace(self, by: Estimator | None = None) -> Number:
        """Exact, or by ``Hutchinson(samples, seed)``, ``HutchPP(products, seed)`` or
        ``XTrace(products, seed)``."""
        if by is None:
            return self._exact_trace()
        return by(self.product, self.size, **self._kind_of())

    def _exact_trace(self) -> Number:
        return Number(float(self.diagonal().sum()), "exact: the sum of the diagonal")

    def norm(self) -> Number:
        """Frobenius."""
        if self.size <= SMALL:
            return Number(float(self.dense().norm()), "exact: from the dense matrix")
        square = traces.squared_norm(self.product, self.size, **self._kind_of())
        value = max(float(square), 0.0) ** 0.5
        error = square.standard_error / (2 * value) if value else 0.0
        return Number(value, square.method, error, square.products)

    # Spectra.

    def eigenvalues(
        self,
        k: int = 10,
        *,
        smallest: bool = False,
        by: Eigensolver = Lanczos(),  # noqa: B008 (frozen)
    ) -> Eigenpairs:
        """The ``k`` algebraically largest (or smallest), with vectors and residuals, ``by``
        ``Lanczos(tolerance, limit, seed)`` or ``LOBPCG(...)``."""
        return by(self.product, self.size, self._count(k), smallest, **self._kind_of())

    def exact_eigenvalues(self) -> Tensor:
        """All of them, descending, from the dense matrix; G, F and C use their Gram matrix and
        leave zeros out."""
        found: Tensor = torch.linalg.eigvalsh(self.dense())
        return found.flip(0)

    def spectrum(self, probes: int = 8, steps: int = 64, seed: int = 0) -> Spectrum:
        """The density of eigenvalues, by stochastic Lanczos quadrature."""
        found = density.quadrature(
            self.product, self.size, probes=probes, steps=steps, seed=seed, **self._kind_of()
        )
        return Spectrum(self.kind, found)

    def logdet(self, damping: float = 0.0, probes: int = 16, steps: int = 64) -> Number:
        """``log det(A + damping I)``."""
        damping = number(damping, "damping", NOT_NEGATIVE)
        if self.size <= SMALL:
            values = self.exact_eigenvalues().double()
            zeros = self.size - len(values)  # which a Gram matrix leaves out
            lowest = min(float(values.min()), 0.0 if zeros else float("inf")) + damping
            if lowest <= 0:
                raise self._no_logarithm(damping, lowest)
            total = float((values + damping).log().sum())
            total += zeros * log(damping) if zeros else 0.0
            return Number(total, "exact: from all eigenvalues")
        return density.logdet(
            self.product,
            self.size,
            damping=damping,
            probes=probes,
            steps=steps,
            **self._kind_of(),
        )

    # Functions.

    def solve(self, v: V, damping: float = 0.0, preconditioner: Operator | None = None) -> V:
        """``(A + damping I)^-1 v``: in closed form for structures, else by conjugate gradients,
        which raise if they do not converge. A structured ``preconditioner`` makes them faster."""
        damping = number(damping, "damping", NOT_NEGATIVE)
        found: V = self._like(v, lambda m: self._solve(m, damping, preconditioner))
        return found

    def _solve(self, v: Tensor, damping: float, preconditioner: Operator | None) -> Tensor:
        found = self.cg(v, damping, preconditioner=preconditioner)
        if not found.converged:
            raise self._not_converged("Solving with", damping, found)
        return found.x

    def cg(
        self,
        v: Tensor,
        damping: float = 0.0,
        *,
        tolerance: float = _TOLERANCE,
        limit: int = 1000,
        preconditioner: Operator | None = None,
    ) -> Solution:
        """``(A + damping I)^-1 v`` by conjugate gradients, with residuals and convergence."""
        damping = number(damping, "damping", NOT_NEGATIVE)
        precondition = None
        if preconditioner is not None:
            if not preconditioner.closed:
                raise SettingError(
                    f"The preconditioner is {preconditioner!r}, which is solved with by iterating "
                    "itself: give an operator with a structure, such as Kronecker()."
                )
            precondition = preconditioner.nearly_inverse(damping)
        return conjugate.solve(
            self.product,
            v,
            damping=damping,
            tolerance=max(tolerance, 32 * torch.finfo(self.dtype).eps),
            limit=limit,
            preconditioner=precondition,
        )

    def nearly_inverse(self, damping: float) -> Product:
        """``m -> (A + damping I)^-1 m`` to speed up iterations with about the same matrix; without
        damping, what is next to nothing keeps zeros apart."""
        shift = damping or 1e-12 * float(self.trace()) / self.size
        return lambda m: self.solve(m, shift)

    def power(self, v: V, exponent: float, damping: float = 0.0) -> V:
        """``(A + damping I)^exponent v``; one half draws samples, minus one half posteriors."""
        damping = number(damping, "damping", NOT_NEGATIVE)
        found: V = self._like(v, lambda m: self._power(m, exponent, damping))
        return found

    def _power(self, v: Tensor, exponent: float, damping: float) -> Tensor:
        if self.size <= SMALL:
            values, vectors = torch.linalg.eigh(self.dense())
            scale = shifted_power(exponent, damping, self.kind)(values)
            exact: Tensor = vectors @ (scale.unsqueeze(1) * (vectors.mT @ v))
            return exact
        found = functions.power(self.product, v, exponent, damping=damping)
        if not found.converged:
            raise self._not_converged(f"The power {exponent:g} of", damping, found)
        return found.x

    # Parts.

    def layers(self) -> dict[str, Operator]:
        """The diagonal block of every layer, over its weight as a matrix with the bias last."""
        from natgrad.operators.sections import sections

        return sections(self)

    def to_scipy(self) -> Any:
        """A ``scipy.sparse.linalg.LinearOperator``."""
        try:
            from scipy.sparse.linalg import LinearOperator  # type: ignore[import-untyped]
        except ImportError as error:
            raise SettingError("to_scipy() needs scipy: pip install scipy.") from error

        def matmat(x: Any) -> Any:
            # A copy: torch takes neither read-only arrays nor negative strides.
            v = torch.tensor(x.copy(), dtype=self.dtype, device=self.device)
            found = self.product(v.view(self.size, -1)).view(v.shape)
            return found.cpu().numpy()

        kind = torch.empty(0, dtype=self.dtype).numpy().dtype
        return LinearOperator(self.shape, matvec=matmat, matmat=matmat, rmatvec=matmat, dtype=kind)

    def __repr__(self) -> str:
        return f"<{self.kind} of {self.size:,} parameters>"

    # Helpers.

    def _like(self, v: Any, function: Any) -> Any:
        """``function`` of columns ``[P, k]``, on a vector of any kind."""
        if isinstance(v, Mapping):
            if self.space is None:
                raise SettingError(
                    f"{self.kind} is over one matrix, not over named parameters: give a tensor "
                    f"[{self.size}] or [{self.size}, k]."
                )
            flat = self.space.flat(v).to(self.dtype)
            return self.space.named(function(flat.unsqueeze(1)).squeeze(1))
        if not isinstance(v, Tensor):
            raise SettingError(
                f"The operator got an object of type {type(v).__name__} but takes tensors, or a "
                "dict of them by parameter name: convert it."
            )
        if v.ndim not in (1, 2) or v.shape[0] != self.size:
            raise SettingError(
                f"The operator has {self.size:,} parameters but got a tensor of shape "
                f"{list(v.shape)}: give [{self.size}], [{self.size}, k] or a dict by name."
            )
        v = v.to(self.dtype)
        return function(v.unsqueeze(1)).squeeze(1) if v.ndim == 1 else function(v)

    def _new(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def _kind_of(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "device": self.device}

    def _count(self, k: int) -> int:
        if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= self.size:
            raise SettingError(
                f"k is {k!r} but must be a whole number from 1 to {self.size:,}, the number of "
                "parameters: give such a number."
            )
        return k

    def _not_converged(self, what: str, damping: float, found: Solution) -> ConvergenceError:
        return ConvergenceError(
            f"{what} {self.kind} with damping {damping:g} stopped at a relative residual of "
            f"{float(found.residuals.max()):.2g} after {found.products} products "
            f"({found.method}): give more damping, or a preconditioner to solve(), or take what "
            "cg() finds."
        )

    def _no_logarithm(self, damping: float, lowest: float) -> SettingError:
        return SettingError(
            f"{self.kind} with damping {damping:g} has the eigenvalue {lowest:.3g}, so its "
            "determinant has no logarithm: give a larger damping."
        )
