"""Sharpness: ``λ_max(H)``, ``tr H``, and the loss nearby, ``max_{|d| ≤ ρ} L(θ+d) - L(θ)``.

The rise of the loss in a ball is that of SAM (Foret et al. 2021). ASAM's ball is in units of the
weights, ``|d / |θ|| ≤ ρ``, so it is the same for ReLU networks that differ in how layers share
their scale (Kwon et al. 2021). Both are among the measures of Jiang et al. 2020. ``2 / λ_max`` is
the largest learning rate at which plain gradient descent is stable. Flat minima do not always
generalise better (Kaur et al. 2022).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, isnan
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.checks import NOT_NEGATIVE, POSITIVE, check_numbers, check_whole
from natgrad.linalg.results import Number
from natgrad.measures.displaced_parameters import displaced, position
from natgrad.measures.matrix_choice import Matrix, operator_of
from natgrad.operators import Problem, XTrace, hessian
from natgrad.operators.estimators import Estimator


@dataclass(frozen=True)
class Region(ABC):
    """Where the largest loss is looked for: ``θ + T u`` with ``|u| ≤ radius``.

    One step of gradient ascent is SAM's; with more of them, the point stays inside the ball.

    Arguments:
        radius: ``ρ > 0``, bound on ``|u|``.
        steps: of gradient ascent, at least 1; each is a gradient and a loss over all data.
        restarts: further ascents, from random points of the ball's surface: at a minimum the
            gradient says nothing. 0 or more.
        seed: of the random points.
    """

    radius: float = 0.05
    steps: int = 1
    restarts: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_numbers(self, radius=POSITIVE)
        check_whole(self.steps, f"{type(self).__name__}.steps", 1)
        check_whole(self.restarts, f"{type(self).__name__}.restarts", 0)
        check_whole(self.seed, f"{type(self).__name__}.seed", 0)

    @abstractmethod
    def scales(self, theta: Tensor) -> Tensor:
        """The diagonal of ``T``, ``[P]``.

        Arguments:
            theta: the parameters ``[P]``.
        """


@dataclass(frozen=True)
class Ball(Region):
    """All parameters alike: ``T = 1``."""

    def scales(self, theta: Tensor) -> Tensor:
        return torch.ones_like(theta)


@dataclass(frozen=True)
class AdaptiveBall(Region):
    """In units of the weights: ``T = |θ| + floor``.

    Arguments:
        floor: ``≥ 0``, added to ``|θ|``; with 0, weights of 0 cannot move.
    """

    radius: float = 0.5
    floor: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, floor=NOT_NEGATIVE)

    def scales(self, theta: Tensor) -> Tensor:
        return theta.abs() + self.floor


@dataclass(frozen=True)
class Rise:
    """How much higher the loss is nearby.

    Arguments:
        loss: at the parameters.
        worst: the largest loss that was found in ``region``; infinite if one was not a number.
        region: where it was looked for.
    """

    loss: float
    worst: float
    region: Region

    @property
    def height(self) -> float:
        """``max L(θ+d) - L(θ)``."""
        return self.worst - self.loss

    def __float__(self) -> float:
        return self.height

    def __str__(self) -> str:
        return f"the loss rises from {self.loss:.6g} to {self.worst:.6g} in {self.region}"


@dataclass(frozen=True)
class Sharpness:
    """Three measures of how sharp a minimum is.

    Arguments:
        largest: ``λ_max``, the algebraically largest eigenvalue.
        residual: of the eigenpair, ``|A v - λ v| / max|λ|``.
        trace: ``tr H``, with a standard error if it was estimated.
        kind: name of the matrix.
        rise: of the loss nearby.
    """

    largest: float
    residual: float
    trace: Number
    kind: str
    rise: Rise

    def __str__(self) -> str:
        return f"sharpness: λ_max {self.largest:.6g}, trace {self.trace} ({self.kind}); {self.rise}"


def sharpness(
    model: nn.Module | Problem,
    loss: Any = None,
    data: Any = None,
    *,
    parameters: Iterable[str] | str | None = None,
    matrix: Matrix = hessian,
    region: Region = Ball(),  # noqa: B008 (frozen)
    by: Estimator | None = None,
) -> Sharpness:
    """Largest eigenvalue, trace, and rise of the loss nearby.

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
        region: where the largest loss is looked for: ``Ball(radius, steps, restarts)`` or
            ``AdaptiveBall(...)``.
        by: how the trace is estimated: ``Hutchinson()``, ``HutchPP()`` or ``XTrace()``. ``None`` is
            exact for a matrix that has a structure or no negative eigenvalue, and else, as for the
            Hessian, ``XTrace(120)``, which is exact up to 120 parameters.
    """
    problem = Problem.of(model, loss, data, parameters=parameters)
    operator = operator_of(matrix, problem)
    top = operator.eigenvalues(1)
    if by is None and not operator.definite and not operator.closed:
        by = XTrace(120)
    trace = operator.trace(by)
    found = rise(problem, region=region)
    return Sharpness(float(top.values[0]), float(top.residuals[0]), trace, operator.kind, found)


def rise(
    model: nn.Module | Problem,
    loss: Any = None,
    data: Any = None,
    *,
    parameters: Iterable[str] | str | None = None,
    region: Region = Ball(),  # noqa: B008 (frozen)
) -> Rise:
    """The largest loss that gradient ascent finds in ``region``: a lower bound on the maximum.

    Each step is ``u <- u + radius · v / |v|``, ``v = T ∇L``, brought back to the ball.

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
        region: where it is looked for: ``Ball(radius, steps, restarts)`` or ``AdaptiveBall(...)``.
    """
    problem = Problem.of(model, loss, data, parameters=parameters)
    theta = position(problem)
    scales = region.scales(theta)
    base = problem.value()
    worst = base
    for u in _starts(region, theta):
        if bool(u.any()):
            worst = max(worst, _loss(problem, scales * u))
        for _ in range(region.steps):
            with displaced(problem, scales * u):
                v = scales * problem.gradient()
            length = float(v.norm())
            if not length:
                break
            u = u + v * (region.radius / length)
            u = u * min(1.0, region.radius / max(float(u.norm()), 1e-300))
            worst = max(worst, _loss(problem, scales * u))
    return Rise(base, worst, region)


def _loss(problem: Problem, change: Tensor) -> float:
    with displaced(problem, change):
        value = problem.value()
    return inf if isnan(value) else value  # an overflow on the way, and max() would not see it


def _starts(region: Region, theta: Tensor) -> Iterable[Tensor]:
    yield torch.zeros_like(theta)
    generator = torch.Generator().manual_seed(region.seed)
    for _ in range(region.restarts):
        u = torch.randn(len(theta), generator=generator, dtype=torch.float64).to(theta)
        yield u * (region.radius / float(u.norm()))
