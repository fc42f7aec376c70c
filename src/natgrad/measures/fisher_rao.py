"""The Fisher-Rao norm, ``|θ|² = θᵀFθ``.

Liang et al. 2019.

How far the weights are from zero, as measured by what the network does: the same for all
networks that compute the same, however ReLU layers share their scale. For ReLU networks without
biases, where ``Σ θ ∂f/∂θ = depth · f``, it is ``depth² · mean fᵀ(∂²loss/∂f²)f``. Of networks that
fit the data equally well, those with a lower one tend to generalise better.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

from natgrad.curvature.fisher import ExactFisher, Fisher
from natgrad.linalg.results import Number
from natgrad.measures.displaced_parameters import position
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

    Arguments:
        model: the network, or a `Problem`, which brings loss, data and parameters along: leave
            these out then, since one given beside it raises `SettingError`. Dropout and BatchNorm
            must be in evaluation mode (``model.eval()``).
        loss: a `Loss`; torch's cross-entropy, square loss or binary cross-entropy with logits with
            ``reduction="mean"``, as a function, a module or a ``functools.partial``; or any
            function of (output, target) that returns the mean over the samples. Such a function has
            no Fisher matrix, except the empirical one, unless its second derivatives come with it,
            ``OwnLoss(function, output_hessian)``.
        data: one batch, or an iterable of batches that can be iterated again, such as a
            ``DataLoader``; an iterator is refused. A batch is ``(inputs, targets)``, where a tuple
            of inputs is passed as several arguments, or a mapping whose ``labels`` are the targets
            and whose other entries are keyword arguments of the model.
        parameters: one pattern of parameter names (``fnmatch``, such as ``"head.*"``) or several,
            each of which must match a trainable parameter; ``None`` takes all trainable parameters.
        curvature: which Fisher matrix: ``ExactFisher()``, ``MonteCarloFisher(samples, seed)`` or
            ``EmpiricalFisher()``, which gives ``mean (θᵀ s_n)²`` with gradients ``s_n`` at the
            targets.
    """
    problem = Problem.of(model, loss, data, parameters=parameters)
    operator = fisher(problem, curvature=curvature)
    theta = position(problem)
    value = float((theta * (operator @ theta)).double().sum())
    return Number(value, f"one product with the {operator.kind}", 0.0, 1)
