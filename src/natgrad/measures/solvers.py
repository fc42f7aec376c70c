"""How ``H^-1 b`` is found for a training loss with the Hessian ``H``: three ways, one result."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.checks import NOT_NEGATIVE, POSITIVE, Range, check_numbers, check_whole
from natgrad.errors import SettingError
from natgrad.linalg import conjugate_gradients
from natgrad.linalg.results import Solution
from natgrad.measures.hyper_objectives import Objective
from natgrad.operators import Operator, ggn
from natgrad.structures import Kronecker

_TOLERANCE = Range(low=0, high=1, open_low=True, open_high=True)


class Solver(ABC):
    """How ``H^-1 b`` is found, with ``H`` the Hessian of the training loss."""

    @abstractmethod
    def solve(self, train: Objective, b: Tensor) -> Solution:
        """``H^-1 b``, with residuals and convergence.

        Arguments:
            train: the training loss.
            b: right-hand sides ``[P, k]``.
        """


@dataclass(frozen=True, eq=False)
class ConjugateGradients(Solver):
    """``(H + damping I)^-1 b``, as exactly as asked for.

    Arguments:
        damping: ``λ ≥ 0``, added to every eigenvalue.
        tolerance: bound on the relative residual of every column, between 0 and 1.
        limit: largest number of iterations.
        preconditioner: an operator with a structure over the same parameters, close to ``H``, that
            makes it need fewer products.
    """

    damping: float = 0.0
    tolerance: float = 1e-8
    limit: int = 1000
    preconditioner: Operator | None = None

    def __post_init__(self) -> None:
        check_numbers(self, damping=NOT_NEGATIVE, tolerance=_TOLERANCE)
        check_whole(self.limit, "ConjugateGradients.limit", 1)
        _check_closed(self.preconditioner, "ConjugateGradients.preconditioner")

    def solve(self, train: Objective, b: Tensor) -> Solution:
        near, precondition = self.preconditioner, None
        if near is not None:
            _check_size(near, len(b))
            precondition = near.nearly_inverse(self.damping)
        return conjugate_gradients.solve(
            train.product,
            b,
            damping=self.damping,
            tolerance=self.tolerance,
            limit=self.limit,
            preconditioner=precondition,
        )


@dataclass(frozen=True)
class Neumann(Solver):
    """The truncated series ``step Σ_j (I - step (H + damping I))^j b``, one product a term.

    Converges for ``0 < step < 2 / (largest eigenvalue + damping)``. It stops short on purpose: few
    terms stand for the few steps of a training that is not at its end.

    Arguments:
        terms: number of terms, at least 1, each a product with ``H``.
        step: ``> 0``, as a learning rate; a sum that overflows raises.
        damping: ``λ ≥ 0``, added to every eigenvalue.
        tolerance: relative residual up to which the result says that it has converged; between 0
            and 1.
    """

    terms: int
    step: float
    damping: float = 0.0
    tolerance: float = 1e-2

    def __post_init__(self) -> None:
        check_whole(self.terms, "Neumann.terms", 1)
        check_numbers(self, step=POSITIVE, damping=NOT_NEGATIVE, tolerance=_TOLERANCE)

    def solve(self, train: Objective, b: Tensor) -> Solution:
        x, left = torch.zeros_like(b), b.clone()
        for _ in range(self.terms):
            x.add_(left, alpha=self.step)
            # What is left of b after j terms is (I - step H)^j b, so the residual is for free.
            left = left - self.step * (train.product(left) + self.damping * left)
        residuals = _relative(left, b)
        if not bool(residuals.isfinite().all()):
            raise SettingError(
                f"Neumann's sum with step {self.step:g} grew beyond all numbers within "
                f"{self.terms} terms: give a step below 2 / (largest eigenvalue + damping)."
            )
        note = "; the sum diverges: give a smaller step" * bool((residuals > 1).any())
        converged = bool((residuals <= self.tolerance).all())
        method = f"Neumann sum of {self.terms} terms{note}"
        return Solution(x, residuals, converged, self.terms * b.shape[1], method)


@dataclass(frozen=True, eq=False)
class KroneckerInverse(Solver):
    """``(matrix + damping I)^-1 b`` in closed form, where ``matrix`` is close to the Hessian.

    The residual is that of the training loss's own Hessian, undamped, so it says how good the
    approximation is.

    Arguments:
        damping: ``≥ 0``, added to the matrix's eigenvalues: stands for what it lacks, such as a
            penalty ``damping/2 |theta|²`` in the loss.
        matrix: an operator with a structure over the same parameters; ``None`` makes ``ggn(train,
            structure=Kronecker())``, for which the training loss must be a `Problem`.
        tolerance: relative residual up to which the result says that it has converged; between 0
            and 1.
    """

    damping: float
    matrix: Operator | None = None
    tolerance: float = 1e-2

    def __post_init__(self) -> None:
        check_numbers(self, damping=NOT_NEGATIVE, tolerance=_TOLERANCE)
        _check_closed(self.matrix, "KroneckerInverse.matrix")

    def solve(self, train: Objective, b: Tensor) -> Solution:
        matrix = self.matrix
        if matrix is None:
            if train.problem is None:
                raise SettingError(
                    "KroneckerInverse has no matrix and the training loss is a function, of which "
                    "layers cannot be seen: give matrix=natgrad.ggn(model, loss, data, "
                    "structure=natgrad.Kronecker())."
                )
            matrix = ggn(train.problem, structure=Kronecker())
        _check_size(matrix, len(b))
        x = matrix.solve(b, self.damping)
        residuals = _relative(b - train.product(x), b)
        converged = bool((residuals <= self.tolerance).all())
        method = f"inverse of {matrix!r} with damping {self.damping:g}"
        return Solution(x, residuals, converged, b.shape[1], method)


def _check_closed(operator: Operator | None, name: str) -> None:
    if operator is not None and not (isinstance(operator, Operator) and operator.closed):
        raise SettingError(
            f"{name} is {operator!r} but must be an operator with a structure, which is inverted "
            "in closed form: give natgrad.ggn(..., structure=natgrad.Kronecker())."
        )


def _check_size(operator: Operator, size: int) -> None:
    if operator.size != size:
        raise SettingError(
            f"{operator!r} does not fit the {size:,} parameters of the training loss: make both "
            "of the same parameters."
        )


def _relative(left: Tensor, b: Tensor) -> Tensor:
    norms = b.norm(dim=0)
    return torch.where(norms > 0, left.norm(dim=0) / norms, torch.zeros_like(norms))
