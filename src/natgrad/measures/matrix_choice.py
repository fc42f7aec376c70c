"""Which curvature matrix a measure reads: a function that makes one of a problem, or one itself."""

from collections.abc import Callable
from typing import Any

from natgrad.curvature.fisher import EmpiricalFisher, Fisher
from natgrad.errors import SettingError
from natgrad.operators import Operator, Problem

Matrix = Operator | Callable[[Problem], Operator]


def operator_of(matrix: Matrix | Any, problem: Problem) -> Operator:
    """The operator that a measure reads.

    Arguments:
        matrix: an operator over the problem's parameters, or a function that makes one of a
            problem: ``natgrad.hessian``, ``natgrad.ggn``, ``lambda p: natgrad.ggn(p,
            structure=Kronecker())``.
        problem: what the function is called with.
    """
    found = matrix(problem) if callable(matrix) and not isinstance(matrix, type) else matrix
    if not isinstance(found, Operator):
        raise SettingError(
            f"matrix is {matrix!r} but must be an operator or a function that makes one of a "
            "problem: give natgrad.hessian, natgrad.ggn or natgrad.fisher."
        )
    if found.size != problem.space.size:
        raise SettingError(
            f"matrix is over {found.size:,} parameters but the measure is over "
            f"{problem.space.size:,}: make both of the same ones."
        )
    return found


def scale_of_sum(problem: Problem, curvature: Fisher, share: float = 1.0) -> float:
    """What the Fisher matrix of the mean loss is times, to be that of ``share`` times the sum of
    all losses: ``share W``, or ``(share W)²/N`` for ``C = N/W² Σ_n s_n s_nᵀ``, as gradients are
    squared there.

    Arguments:
        problem: has ``N`` (samples) and ``W`` (what the sum of all losses is divided by).
        curvature: which Fisher matrix: the empirical one is scaled otherwise.
        share: what each loss is multiplied by.
    """
    scale = share * problem.weight
    return scale**2 / problem.samples if isinstance(curvature, EmpiricalFisher) else scale
