"""Hypergradients by implicit differentiation: ``dtheta*/dlambda = -H^-1 ∂²L/∂theta∂lambda``.

With ``theta*`` the minimum of the training loss, the validation loss has the total derivative
``dL_val/dlambda = ∂L_val/∂lambda - (H^-1 ∂L_val/∂theta)ᵀ ∂²L/∂theta∂lambda``: one linear system,
however many hyperparameters there are (Lorraine et al. 2020).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.errors import SettingError
from natgrad.linalg.results import Solution
from natgrad.measures.hyper_objectives import Objective, Source, check_source, parameters_of
from natgrad.measures.solvers import ConjugateGradients, Solver
from natgrad.operators import requirements

Hyperparameters = Tensor | Sequence[Tensor] | Mapping[str, Tensor]


class Solved:
    """What was found by solving linear systems with the Hessian; ``solution`` has their residuals
    and whether they converged."""

    solution: Solution

    @property
    def residual(self) -> float:
        """``|b - H x| / |b|``, the largest of all right-hand sides ``b``."""
        return float(self.solution.residuals.max())

    @property
    def converged(self) -> bool:
        return self.solution.converged


@dataclass(frozen=True, eq=False)
class Hypergradient(Solved):
    """The total derivative of the validation loss by every hyperparameter.

    Arguments:
        gradient: ``dL_val/dlambda``, a tensor, list or dict as the hyperparameters were given.
        direct: the part ``∂L_val/∂lambda``, likewise; the rest goes through the trained weights.
        solution: ``H^-1 ∂L_val/∂theta [P]``, with residuals and convergence.
        slope: ``|∂L/∂theta|`` of the training loss: the formula holds where it is 0.
    """

    gradient: Any
    direct: Any
    solution: Solution
    slope: float


@dataclass(frozen=True, eq=False)
class ParameterResponse(Solved):
    """How the trained weights move with the hyperparameters.

    Arguments:
        jacobian: ``dtheta*/dlambda``: for every hyperparameter ``[P, *its shape]``, as a tensor,
            list or dict as these were given.
        solution: ``H^-1 ∂²L/∂theta∂lambda [P, h]`` for the ``h`` single hyperparameters, with
            residuals and convergence.
        slope: ``|∂L/∂theta|`` of the training loss: the formula holds where it is 0.
    """

    jacobian: Any
    solution: Solution
    slope: float


def hypergradient(
    train: Source,
    validation: Source,
    hyperparameters: Hyperparameters,
    *,
    parameters: nn.Module | Mapping[str, Tensor] | None = None,
    solver: Solver = ConjugateGradients(),  # noqa: B008 (frozen)
) -> Hypergradient:
    """``dL_val/dlambda`` at the minimum of the training loss, where the parameters should be.

    Arguments:
        train: the training loss: a `Problem`, or a function without arguments that computes it
            anew.
        validation: the validation loss, a `Problem` of the same model or such a function.
        hyperparameters: a tensor, a sequence or a mapping of tensors with ``requires_grad=True``.
            Each must be used by one of the losses and be none of ``parameters``.
        parameters: for a training loss that is a function, what it optimises: the model, whose
            trainable parameters are taken, or tensors by name; ``None`` for a `Problem`, which
            knows its own.
        solver: how ``H^-1 b`` is found: ``ConjugateGradients()``, ``Neumann(terms, step)`` or
            ``KroneckerInverse(damping)``.
    """
    names, tensors = _named(hyperparameters)
    check_source(validation, "validation")
    own = parameters_of(train, parameters)
    _check_apart(names, tensors, own)
    training = Objective(train, own, "training", tensors)
    b, direct = Objective(validation, own, "validation", tensors).gradients()
    slope, _ = training.gradients()
    found = _solver(solver).solve(training, b.unsqueeze(1))
    solution = Solution(
        found.x[:, 0], found.residuals, found.converged, found.products, found.method
    )
    indirect = training.mixed(solution.x)
    for name, one, two in zip(names, direct, indirect, strict=True):
        if one is None and two is None:
            raise _unused(name)
    known = [torch.zeros_like(t) if d is None else d for t, d in zip(tensors, direct, strict=True)]
    total = [d if i is None else d - i for d, i in zip(known, indirect, strict=True)]
    return Hypergradient(
        _like(hyperparameters, total), _like(hyperparameters, known), solution, float(slope.norm())
    )


def parameter_response(
    train: Source,
    hyperparameters: Hyperparameters,
    *,
    parameters: nn.Module | Mapping[str, Tensor] | None = None,
    solver: Solver = ConjugateGradients(),  # noqa: B008 (frozen)
) -> ParameterResponse:
    """``dtheta*/dlambda = -H^-1 ∂²L/∂theta∂lambda``, written out: for few hyperparameters.

    Arguments:
        train: the training loss: a `Problem`, or a function without arguments that computes it
            anew.
        hyperparameters: a tensor, a sequence or a mapping of tensors with ``requires_grad=True``,
            none of which is one of ``parameters``.
        parameters: for a training loss that is a function, what it optimises: the model, whose
            trainable parameters are taken, or tensors by name; ``None`` for a `Problem`, which
            knows its own.
        solver: how ``H^-1 b`` is found: ``ConjugateGradients()``, ``Neumann(terms, step)`` or
            ``KroneckerInverse(damping)``. One system is solved for each single hyperparameter.
    """
    names, tensors = _named(hyperparameters)
    own = parameters_of(train, parameters)
    _check_apart(names, tensors, own)
    training = Objective(train, own, "training", tensors)
    size, count = training.space.size, sum(t.numel() for t in tensors)
    what = "The response of the parameters"
    requirements.fits(
        size, count, training.own[0].dtype, what, "use hypergradient, or fewer of them"
    )
    slope, _ = training.gradients()
    found = _solver(solver).solve(training, training.columns())
    pieces = (-found.x).split([t.numel() for t in tensors], 1)
    shaped = [piece.reshape(size, *t.shape) for piece, t in zip(pieces, tensors, strict=True)]
    return ParameterResponse(_like(hyperparameters, shaped), found, float(slope.norm()))


def _named(given: Hyperparameters) -> tuple[list[str], list[Tensor]]:
    if isinstance(given, Tensor):
        pairs = [("hyperparameters", given)]
    elif isinstance(given, Mapping):
        pairs = [(str(name), t) for name, t in given.items()]
    else:
        pairs = [(f"hyperparameters[{i}]", t) for i, t in enumerate(given)]
    if not pairs:
        raise SettingError("There are no hyperparameters: give at least one tensor.")
    for name, t in pairs:
        if not isinstance(t, Tensor) or not t.requires_grad:
            what = "a tensor without gradients" if isinstance(t, Tensor) else repr(t)
            raise SettingError(
                f"{name} is {what} but must be a tensor with requires_grad=True that the training "
                "loss uses: make it one."
            )
    return [name for name, _ in pairs], [t for _, t in pairs]


def _like(given: Hyperparameters, found: list[Tensor]) -> Any:
    if isinstance(given, Tensor):
        return found[0]
    return dict(zip(given, found, strict=True)) if isinstance(given, Mapping) else found


def _check_apart(names: list[str], tensors: list[Tensor], own: Mapping[str, Tensor]) -> None:
    for name, t in zip(names, tensors, strict=True):
        for parameter, p in own.items():
            if p is t:
                raise SettingError(
                    f"{name} is the parameter {parameter!r}, which the training optimises: leave "
                    "it out of the parameters with Problem(..., parameters=[...])."
                )


def _solver(given: object) -> Solver:
    if not isinstance(given, Solver):
        raise SettingError(
            f"solver is {given!r} but must be ConjugateGradients(...), Neumann(terms, step) or "
            "KroneckerInverse(damping): give one of them."
        )
    return given


def _unused(name: str) -> SettingError:
    return SettingError(
        f"{name} is in neither loss, so there is nothing to differentiate: use the tensor itself "
        "in the training loss, not a copy or its number."
    )
