"""The Fisher-Rao norm, ``|θ|² = θᵀFθ`` (Y25).

[Liang, Poggio, Rakhlin and Stokes, Fisher-Rao metric, geometry, and complexity of neural networks,
2019.] How far the weights are from zero, as measured by what the network does: the same for all
networks that compute the same, however ReLU layers share their scale. For ReLU networks without
biases, where ``Σ θ ∂f/∂θ = depth · f``, it is ``depth² · mean fᵀ(∂²loss/∂f²)f``. Of networks that
fit the data equally well, those with a lower one tend to generalise better.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

from natgrad.curvature.fisher import ExactFisher, Fisher
from natgrad.linalg.results import Number
from natgrad.measures.moved import position
from natgrad.operators import Problem, fisher


def fisher_rao(
    model: nn.Module | Problem,
    loss: Any = None,
    data: Any = None,
    *,
    parameters: Iterable[str] | str | None = None,
    curvature: Fisher = ExactFisher(),  # noqa: B008 (frozen)
) -> Number:
    """The square of the norm, exact, by one product with ``F``.

    ``EmpiricalFisher()`` as ``curvature`` gives ``mean (θᵀ s_n)²``, with gradients at the targets.
    """
    problem = Problem.of(model, loss, data, parameters=parameters)
    operator = fisher(problem, curvature=curvature)
    theta = position(problem)
    value = float((theta * (operator @ theta)).double().sum())
    return Number(value, f"one product with the {operator.kind}", 0.0, 1)
