"""Takeuchi's information criterion, ``TIC = L + tr(H⁻¹C) / N`` (Y24).

[Takeuchi, 1976; for networks: Thomas, Pedregosa, van Merriënboer, Manzagol, Bengio and Le Roux, On
the interplay between noise and curvature and its effect on optimization and generalization, 2020.]
``L`` is the mean loss at its minimum, ``H`` its Hessian and ``C`` the second moment of gradients of
samples. ``tr(H⁻¹C) / N`` estimates how much larger the loss is on other data. For a likelihood that
contains the truth ``H = C``, so the trace is the number of parameters and TIC Akaike's criterion
(over 2N); in general it is the number of parameters that count.

With ``damping``, ``H + damping I`` is inverted, as for a quadratic prior of that strength a sample.
The Gauss-Newton matrix in place of ``H`` is never indefinite; structured matrices make it cheap.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.errors import SettingError
from natgrad.linalg.results import Number
from natgrad.measures.matrices import Matrix, operator_of
from natgrad.measures.sample_traces import Apply, Signs, Subset, sample_trace
from natgrad.operators import Operator, Problem, hessian
from natgrad.operators.base import SMALL
from natgrad.runtime.ranges import NOT_NEGATIVE, number


@dataclass(frozen=True)
class TIC:
    """``trace`` is ``tr(H⁻¹C)``; ``kind`` names the matrix that stands for ``H``."""

    loss: float
    trace: Number
    samples: int
    kind: str
    damping: float

    @property
    def penalty(self) -> Number:
        """``tr(H⁻¹C) / N``, the estimate of what the loss on other data has in excess."""
        t, n = self.trace, self.samples
        return Number(float(t) / n, t.method, t.standard_error / n, t.products)

    @property
    def value(self) -> Number:
        p = self.penalty
        return Number(self.loss + float(p), p.method, p.standard_error, p.products)

    def __float__(self) -> float:
        return float(self.value)

    def __str__(self) -> str:
        damped = f" with damping {self.damping:g}" if self.damping else ""
        return (
            f"TIC {self.value} = loss {self.loss:.6g} + {self.penalty}: "
            f"{self.trace} parameters count ({self.kind}{damped}), {self.samples:,} samples"
        )


def tic(
    model: nn.Module | Problem,
    loss: Any = None,
    data: Any = None,
    *,
    parameters: Iterable[str] | str | None = None,
    matrix: Matrix = hessian,
    damping: float = 0.0,
    by: Subset | Signs | None = None,
) -> TIC:
    """At the parameters as they are, which should be at a minimum of the loss.

    ``matrix``: what stands for ``H``: ``natgrad.hessian``, ``natgrad.ggn``, ``natgrad.fisher``, or
    ``lambda p: natgrad.ggn(p, structure=natgrad.Kronecker())``. Exact, with one solve for each
    sample or parameter, whichever are fewer; or with as many as ``by`` says.
    """
    damping = number(damping, "damping", NOT_NEGATIVE)
    problem = Problem.of(model, loss, data, parameters=parameters)
    operator = operator_of(matrix, problem)
    trace = sample_trace(problem, _inverse(operator, damping), by)
    return TIC(problem.value(), trace, problem.samples, operator.kind, damping)


def _inverse(operator: Operator, damping: float) -> Apply:
    if operator.closed or operator.size > SMALL:
        return lambda v: operator.solve(v, damping)
    dense = operator.dense()
    dense.diagonal().add_(damping)
    factor, failed = torch.linalg.cholesky_ex(dense)
    if bool(failed):
        lowest = float(torch.linalg.eigvalsh(dense)[0])
        raise SettingError(
            f"{operator.kind} with damping {damping:g} has the eigenvalue {lowest:.3g} and so no "
            "minimum that TIC could be of: give more damping, or matrix=natgrad.ggn."
        )

    def solve(v: Tensor) -> Tensor:
        return torch.cholesky_solve(v, factor)

    return solve
