"""Takeuchi's information criterion, ``TIC = L + tr(H⁻¹C) / N``.

Takeuchi 1976; for networks, Thomas et al. 2020.

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

from natgrad.checks import NOT_NEGATIVE, number
from natgrad.errors import SettingError
from natgrad.linalg.results import Number
from natgrad.measures.matrix_choice import Matrix, operator_of
from natgrad.measures.sample_traces import Apply, Signs, Subset, sample_trace
from natgrad.operators import Operator, Problem, hessian
from natgrad.operators.base import SMALL


@dataclass(frozen=True)
class TIC:
    """Takeuchi's criterion, and what it is made of.

    Arguments:
        loss: ``L``, the mean loss.
        trace: ``tr(H⁻¹C)``, with a standard error if it was estimated.
        samples: ``N``.
        kind: name of the matrix that stands for ``H``.
        damping: what was added to the eigenvalues of that matrix.
    """

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

    Arguments:
        model: the network, or a `Problem`, which brings loss, data and parameters along: leave
            these out then, since one given beside it raises `SettingError`. Dropout and BatchNorm
            must be in evaluation mode (``model.eval()``).
        loss: a `Loss`; torch's cross-entropy, square loss or binary cross-entropy with logits with
            ``reduction="mean"``, as a function, a module or a ``functools.partial``; or any
            function of (output, target) that returns the mean over the samples.
        data: one batch, or an iterable of batches that can be iterated again, such as a
            ``DataLoader``; an iterator is refused. A batch is ``(inputs, targets)``, where a tuple
            of inputs is passed as several arguments, or a mapping whose ``labels`` are the targets
            and whose other entries are keyword arguments of the model.
        parameters: one pattern of parameter names (``fnmatch``, such as ``"head.*"``) or several,
            each of which must match a trainable parameter; ``None`` takes all trainable parameters.
        matrix: what stands for ``H``: ``natgrad.hessian``, ``natgrad.ggn``, ``natgrad.fisher``, a
            function from a `Problem` to an operator such as ``lambda p: natgrad.ggn(p,
            structure=natgrad.Kronecker())``, or an operator over the same parameters.
        damping: ``λ ≥ 0``, added to every eigenvalue of ``H``; a matrix that is not positive
            definite with it raises.
        by: ``Subset(samples, seed)`` or ``Signs(probes, seed)`` to estimate the trace; ``None`` is
            exact, with one solve for each sample or each parameter, whichever are fewer, and for
            each parameter on several processes.
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
