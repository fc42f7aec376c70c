"""A symmetric matrix over the parameters, known by its products: ``A @ v`` and what follows."""

from __future__ import annotations

from math import log
from typing import ClassVar

import torch
from torch import Tensor

from natgrad.checks import NOT_NEGATIVE, number
from natgrad.errors import ConvergenceError, SettingError
from natgrad.linalg import conjugate_gradients, density, matrix_functions, traces
from natgrad.linalg.matrix_free import Product
from natgrad.linalg.results import Eigenpairs, Estimate, Number, Solution
from natgrad.operators import requirements
from natgrad.operators.estimators import Eigensolver, Estimator, Lanczos
from natgrad.operators.powers import shifted_power
from natgrad.operators.products import Products, V
from natgrad.operators.progress import track
from natgrad.operators.spectrum import Spectrum

SMALL = 2048  # parameters of which a dense matrix is cheaper than an iteration
_PRODUCTS = 1 << 16  # more of them for one diagonal are a mistake
_NUMBERS = 1 << 24  # in vectors that are multiplied together
_TOLERANCE = 1e-10  # of solve(), relative; float32 stops at its own precision


class Operator(Products):
    """A symmetric matrix over the parameters, known by its products.

    Vectors are flat ``[P]``, several ``[P, k]``, or a dict by parameter name; the result is of the
    same kind. The matrix is that of the parameters as they are when it is used. ``definite`` says
    that no eigenvalue is below zero.

    Arguments:
        problem: model, loss and data that the matrix belongs to.
        kind: name of the matrix, in print and in error sentences.
        size: number of rows; ``None`` takes the number ``P`` of the problem's parameters. An
            operator of another size, such as one of a single layer, does not take vectors as dicts.
    """

    definite: bool = False
    closed: ClassVar[bool] = False  # whether functions of it are known without iterating

    def __add__(self, other: Operator) -> Operator:
        from natgrad.operators.algebra import OperatorSum

        if not isinstance(other, Operator):
            return NotImplemented
        return OperatorSum([(1.0, self), (1.0, other)])

    def __sub__(self, other: Operator) -> Operator:
        from natgrad.operators.algebra import OperatorSum

        if not isinstance(other, Operator):
            return NotImplemented
        return OperatorSum([(1.0, self), (-1.0, other)])

    def __mul__(self, factor: float) -> Operator:
        from natgrad.operators.algebra import OperatorSum

        try:
            return OperatorSum([(float(factor), self)])
        except (TypeError, ValueError):  # no number
            return NotImplemented

    __rmul__ = __mul__

    # Entries.

    def dense(self) -> Tensor:
        """``[P, P]``, if it is not too large."""
        requirements.fits(
            self.size, self.size, self.dtype, self.kind, "use products, or a structure"
        )
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
        """Some columns of the matrix, ``[P, k]``.

        Arguments:
            which: ``[k]``, their positions.
        """
        ones = self._new(self.size, len(which))
        ones[which, torch.arange(len(which), device=self.device)] = 1.0
        return self.product(ones)

    def estimated_diagonal(self, samples: int = 100, seed: int = 0) -> Estimate:
        """The diagonal ``[P]`` from products with random signs, with a standard error for each
        entry.

        Arguments:
            samples: number of random vectors, at least 2, each one product; with ``P`` or more the
                diagonal is exact.
            seed: of the random signs; the same seed gives the same result on every device.
        """
        return traces.diagonal(self.product, self.size, samples, seed=seed, **self._kind_of())

    def trace(self, by: Estimator | None = None) -> Number:
        """The trace, exact or estimated.

        Arguments:
            by: ``Hutchinson(samples, seed)``, ``HutchPP(products, seed)`` or ``XTrace(products,
                seed)``; ``None`` is exact, from the diagonal.
        """
        if by is None:
            return self._exact_trace()
        return by(self.product, self.size, **self._kind_of())

    def _exact_trace(self) -> Number:
        return Number(float(self.diagonal().sum()), "exact: the sum of the diagonal")

    def norm(self) -> Number:
        """The Frobenius norm: exact for structures, for up to 2,048 parameters, and for G, F and C
        of few samples and outputs; else estimated from 100 products."""
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
        """Some eigenvalues with vectors and residuals, descending.

        Arguments:
            k: how many, from 1 to ``P``.
            smallest: whether the algebraically smallest are wanted (the most negative ones, if
                there are any), not the largest.
            by: ``Lanczos(tolerance, limit, seed)`` or ``LOBPCG(...)``. A structure has eigenvalues
                in closed form and does not use it.
        """
        return by(self.product, self.size, self._count(k), smallest, **self._kind_of())

    def exact_eigenvalues(self) -> Tensor:
        """All of them, descending, from the dense matrix; G, F and C use their Gram matrix where
        that is smaller, and leave zeros out."""
        found: Tensor = torch.linalg.eigvalsh(self.dense())
        return found.flip(0)

    def spectrum(self, probes: int = 8, steps: int = 64, seed: int = 0) -> Spectrum:
        """The density of eigenvalues, by stochastic Lanczos quadrature.

        Arguments:
            probes: number of random vectors, at least 2, each the start of a Lanczos iteration of
                its own; more of them lower the standard error.
            steps: products of each iteration; more of them resolve finer details. A small matrix of
                at most ``probes * steps`` rows is decomposed instead, exactly.
            seed: of the random vectors.
        """
        found = density.quadrature(
            self.product, self.size, probes=probes, steps=steps, seed=seed, **self._kind_of()
        )
        return Spectrum(self.kind, found)

    def logdet(self, damping: float = 0.0, probes: int = 16, steps: int = 64) -> Number:
        """``log det(A + damping I)``, exact for structures and for up to 2,048 parameters.

        Arguments:
            damping: ``λ ≥ 0``, added to every eigenvalue; a matrix that is not positive definite
                with it raises `SettingError`.
            probes: number of random vectors of the estimate that is made above 2,048 parameters.
            steps: of the Lanczos iteration of each of them.
        """
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
        """``(A + damping I)^-1 v``: in closed form for structures, else by conjugate gradients to a
        relative residual of 1e-10 (or what the dtype allows), which raise `ConvergenceError` if
        they do not get there within 1,000 iterations.

        Arguments:
            v: ``[P]``, ``[P, k]``, or a dict by parameter name.
            damping: ``λ ≥ 0``, added to every eigenvalue; 0 raises for a structure that is
                singular.
            preconditioner: an operator with a structure, close to this one, that makes conjugate
                gradients need fewer products; an operator with a structure does not use it.
        """
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
        """``(A + damping I)^-1 v`` by conjugate gradients, with residuals and convergence.

        Arguments:
            v: ``[P]`` or ``[P, k]``.
            damping: ``λ ≥ 0``, added to every eigenvalue.
            tolerance: bound on the relative residual ``|v - (A + damping I) x| / |v|`` of every
                column, between 0 and 1; at least 32 roundings of the dtype.
            limit: largest number of iterations; the result of fewer than needed says
                ``converged=False``.
            preconditioner: an operator with a structure, close to this one; one without raises
                `SettingError`.
        """
        damping = number(damping, "damping", NOT_NEGATIVE)
        precondition = None
        if preconditioner is not None:
            if not preconditioner.closed:
                raise SettingError(
                    f"The preconditioner is {preconditioner!r}, which is solved with by iterating "
                    "itself: give an operator with a structure, such as Kronecker()."
                )
            precondition = preconditioner.nearly_inverse(damping)
        return conjugate_gradients.solve(
            self.product,
            v,
            damping=damping,
            tolerance=max(tolerance, 32 * torch.finfo(self.dtype).eps),
            limit=limit,
            preconditioner=precondition,
        )

    def nearly_inverse(self, damping: float) -> Product:
        """``m -> (A + damping I)^-1 m``, as a preconditioner for iterations with a similar matrix.

        Arguments:
            damping: ``λ ≥ 0``; 0 is replaced by 1e-12 of the mean eigenvalue, so that eigenvalues
                of zero can be inverted.
        """
        shift = damping or 1e-12 * float(self.trace()) / self.size
        return lambda m: self.solve(m, shift)

    def power(self, v: V, exponent: float, damping: float = 0.0) -> V:
        """``(A + damping I)^exponent v``: in closed form for structures and for up to 2,048
        parameters, else by a Krylov iteration, which raises `ConvergenceError` if it does not
        converge.

        Arguments:
            v: ``[P]``, ``[P, k]``, or a dict by parameter name.
            exponent: any number: ½ turns white noise into samples with covariance ``A``, -½ into
                samples with precision ``A``.
            damping: ``λ ≥ 0``, added to every eigenvalue first. A negative exponent of a singular
                matrix and a fractional one of negative eigenvalues raise `SettingError`.
        """
        damping = number(damping, "damping", NOT_NEGATIVE)
        found: V = self._like(v, lambda m: self._power(m, exponent, damping))
        return found

    def _power(self, v: Tensor, exponent: float, damping: float) -> Tensor:
        if self.size <= SMALL:
            values, vectors = torch.linalg.eigh(self.dense())
            scale = shifted_power(exponent, damping, self.kind)(values)
            exact: Tensor = vectors @ (scale.unsqueeze(1) * (vectors.mT @ v))
            return exact
        found = matrix_functions.power(self.product, v, exponent, damping=damping)
        if not found.converged:
            raise self._not_converged(f"The power {exponent:g} of", damping, found)
        return found.x

    # Parts.

    def layers(self) -> dict[str, Operator]:
        """The diagonal block of every layer, over its weight as a matrix with the bias last."""
        from natgrad.operators.layer_blocks import diagonal_blocks

        return diagonal_blocks(self)

    # Helpers.

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
