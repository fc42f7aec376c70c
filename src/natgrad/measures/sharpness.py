"""Sharpness: ``λ_max(H)``, ``tr H``, and the loss nearby, ``max_{|d| ≤ ρ} L(θ+d) - L(θ)``.

[Foret, Kleiner, Mobahi and Neyshabur, Sharpness-aware minimization (SAM), 2021, for the rise; Kwon,
Kim, Park and Choi, ASAM, 2021, for balls in units of the weights, ``|d / |θ|| ≤ ρ``, the same for
ReLU networks that differ in how layers share their scale; Y14, Y25.] ``2 / λ_max`` is the largest
learning rate at which plain gradient descent is stable. Flat minima do not always generalise better
[Kaur, Cohen and Lipton, On the maximum Hessian eigenvalue and generalization, 2022].
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, isnan
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.linalg.results import Number
from natgrad.measures.matrices import Matrix, operator_of
from natgrad.measures.moved import moved, position
from natgrad.operators import Problem, XTrace, hessian
from natgrad.operators.estimators import Estimator
from natgrad.runtime.ranges import NOT_NEGATIVE, POSITIVE, check_numbers, check_whole


@dataclass(frozen=True)
class Region(ABC):
    """Where the largest loss is looked for: ``θ + T u`` with ``|u| ≤ radius``.

    One step of ascent is SAM's; more of them stay inside the ball. ``restarts`` further ones start
    at random points of its surface: at a minimum, the gradient says nothing.
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
        """The diagonal of ``T``, ``[P]``."""


@dataclass(frozen=True)
class Ball(Region):
    """All parameters alike: ``T = 1``."""

    def scales(self, theta: Tensor) -> Tensor:
        return torch.ones_like(theta)


@dataclass(frozen=True)
class AdaptiveBall(Region):
    """In units of the weights: ``T = |θ| + floor``."""

    radius: float = 0.5
    floor: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, floor=NOT_NEGATIVE)

    def scales(self, theta: Tensor) -> Tensor:
        return theta.abs() + self.floor


@dataclass(frozen=True)
class Rise:
    """``loss`` at the parameters, and the largest one found in ``region``, ``worst``."""

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
    """``largest`` is ``λ_max``, with the ``residual`` it was found to."""

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
    """All three. ``by``: how the trace is estimated, where it is not to be had exactly; that of a
    Hessian by ``XTrace(120)`` otherwise, which is exact for up to 120 parameters."""
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
    """The largest loss that gradient ascent finds in ``region``: a bound on the maximum from below.

    Each step is ``u <- u + radius · v / |v|``, ``v = T ∇L``, brought back to the ball.
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
            with moved(problem, scales * u):
                v = scales * problem.gradient()
            length = float(v.norm())
            if not length:
                break
            u = u + v * (region.radius / length)
            u = u * min(1.0, region.radius / max(float(u.norm()), 1e-300))
            worst = max(worst, _loss(problem, scales * u))
    return Rise(base, worst, region)


def _loss(problem: Problem, change: Tensor) -> float:
    with moved(problem, change):
        value = problem.value()
    return inf if isnan(value) else value  # an overflow on the way, and max() would not see it


def _starts(region: Region, theta: Tensor) -> Iterable[Tensor]:
    yield torch.zeros_like(theta)
    generator = torch.Generator().manual_seed(region.seed)
    for _ in range(region.restarts):
        u = torch.randn(len(theta), generator=generator, dtype=torch.float64).to(theta)
        yield u * (region.radius / float(u.norm()))
