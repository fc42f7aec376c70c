"""The Laplace posterior of a trained network (Y22): ``N(theta*, (N F + tau I)^-1)``.

The negative log posterior ``-log p(D | theta) + tau/2 |theta|²`` is replaced by its second-order
expansion at ``theta*``. ``-log p(D | theta) = s Σ_n loss_n + const``, where ``s`` is 1 for losses
of classes and ``1 / (2 noise²)`` for the square loss, so that the precision is ``s W F + tau I``
with the matrix ``F`` of the mean loss and ``W`` terms in that mean (MacKay 1992; Ritter, Botev and
Barber 2018 with Kronecker factors).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.curvature.fisher import ExactFisher, Fisher
from natgrad.curvature.losses import Loss, SquareLoss
from natgrad.errors import SettingError
from natgrad.linalg.matrix import generator_of
from natgrad.linalg.results import Number
from natgrad.linalg.symmetric import DenseBlocks
from natgrad.measures.matrices import scale_of_sum
from natgrad.measures.moved import position
from natgrad.measures.predictive import Linearised, Prediction, Predictive, linearised
from natgrad.measures.swapping import swapped
from natgrad.operators import Operator, Problem, Structured, fisher
from natgrad.operators.structured import Placed
from natgrad.runtime.discovery import StructureOf
from natgrad.runtime.ranges import POSITIVE, check_whole, number
from natgrad.structures import Full, Kronecker


@dataclass(frozen=True, eq=False)
class Laplace:
    """``mean [P]`` and ``precision = scale * matrix + prior_precision * I``.

    Make one with ``Laplace.fit``, at the weights a training has ended with.
    """

    problem: Problem
    matrix: Structured
    mean: Tensor
    scale: float
    log_likelihood: float
    prior_precision: float
    noise: float

    @classmethod
    def fit(
        cls,
        model: nn.Module | Problem,
        loss: Any = None,
        data: Any = None,
        *,
        structure: StructureOf = Kronecker(),  # noqa: B008 (frozen)
        prior_precision: float = 1.0,
        noise: float = 1.0,
        curvature: Fisher = ExactFisher(),  # noqa: B008 (frozen)
        parameters: Iterable[str] | str | None = None,
        group: Any = None,
        progress: bool | None = None,
        check: bool = True,
    ) -> Laplace:
        """One pass over the data at the weights as they are; ``structure=None`` keeps all of F.

        ``prior_precision``: of a Gaussian prior around 0, ``1 / variance``. ``noise``: the standard
        deviation of targets of a square loss. ``parameters``: patterns of names, such as those of
        the last layer; all others are taken as certain.
        """
        options = {"parameters": parameters, "group": group, "progress": progress, "check": check}
        problem = Problem.of(model, loss, data, **options)
        prior_precision = number(prior_precision, "prior_precision", POSITIVE)
        share, constant = _likelihood(problem.loss, number(noise, "noise", POSITIVE))
        matrix = _closed(fisher(problem, curvature=curvature, structure=structure))
        scale = scale_of_sum(problem, curvature, share)
        log_likelihood = -problem.weight * (share * problem.value() + constant)
        mean = position(problem)
        return cls(problem, matrix, mean, scale, log_likelihood, prior_precision, noise)

    # Weights.

    def sample(self, n: int = 1, seed: int = 0) -> list[dict[str, Tensor]]:
        """``n`` draws of all parameters by name, the same on every device and rank."""
        check_whole(n, "n", 1)
        generator, size = generator_of(seed), len(self.mean)
        # One at a time, so that the first of many is the only one of one.
        drawn = [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(n)]
        moved = self.root(torch.stack(drawn, 1).to(self.mean)) + self.mean.unsqueeze(1)
        return [self.problem.space.named(one.contiguous()) for one in moved.mT]

    def swapped(self, weights: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """The model has these weights inside of the context, and its own ones afterwards."""
        return swapped(self.problem.parameters, weights)

    def covariance(self, v: Tensor) -> Tensor:
        """``(precision)^-1 v`` for ``v [P]`` or ``[P, k]``."""
        found: Tensor = self.matrix.solve(v, self.damping)
        return found / self.scale

    def root(self, v: Tensor) -> Tensor:
        """``(precision)^-1/2 v`` for ``v [P]`` or ``[P, k]``."""
        found: Tensor = self.matrix.power(v, -0.5, self.damping)
        return found / math.sqrt(self.scale)

    @property
    def damping(self) -> float:
        """``precision = scale (matrix + damping I)``."""
        return self.prior_precision / self.scale

    # Predictions.

    def outputs(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """The Gaussian of the linearised model's outputs: mean ``[n, …]`` and covariance
        ``[n, D, D]`` over the D outputs of a sample, without the noise of targets."""
        f, roots = linearised(self, inputs)
        return f, roots @ roots.mT

    def predict(
        self,
        inputs: Any,
        by: Predictive = Linearised(),  # noqa: B008 (frozen)
    ) -> Prediction:
        """Mean and variance of the targets of new inputs, by ``Linearised()`` or
        ``MonteCarlo(samples, seed)``."""
        if not isinstance(by, Predictive):
            raise SettingError(
                f"by is {by!r} but must be Linearised() or MonteCarlo(samples, seed): give one of "
                "them."
            )
        return by(self, inputs)

    # Evidence.

    def log_marginal_likelihood(self) -> Number:
        """``log p(D | theta*) - tau/2 |theta*|² + P/2 log tau - 1/2 log det(precision)``: how well
        data and prior go together. Exact for a linear model with Gaussian noise."""
        size, tau = len(self.mean), self.prior_precision
        determinant = size * math.log(self.scale) + float(self.matrix.logdet(self.damping))
        prior = size * math.log(tau) - tau * self._square()
        value = self.log_likelihood + (prior - determinant) / 2
        return Number(value, "exact: from the eigenvalues of all blocks")

    def effective_parameters(self) -> float:
        """``Σ_i e_i / (e_i + tau)`` over the eigenvalues of ``scale * matrix``: how many directions
        the data have determined, between 0 and P."""
        return _effective(self._curvatures(), self.prior_precision)

    def tuned(self) -> Laplace:
        """With the prior precision that maximises the marginal likelihood at these weights.

        There ``tau |theta*|²`` is the number of effective parameters; the one grows and the other
        falls with tau, so there is one such tau.
        """
        values, square = self._curvatures(), self._square()
        if square == 0 or not bool((values > 0).any()):
            what = "all parameters are 0" if square == 0 else "the loss has no curvature"
            raise SettingError(
                f"No prior precision is best, as {what}: fit the posterior at the weights of a "
                "trained model, and on data that they matter for."
            )
        high = math.log(len(values) / square)
        low = high
        while _effective(values, math.exp(low)) <= math.exp(low) * square:
            low -= 1.0
        for _ in range(100):
            middle = (low + high) / 2
            above = _effective(values, math.exp(middle)) > math.exp(middle) * square
            low, high = (middle, high) if above else (low, middle)
        return replace(self, prior_precision=math.exp((low + high) / 2))

    def _curvatures(self) -> Tensor:
        return self.matrix.exact_eigenvalues().double().clamp(min=0.0) * self.scale

    def _square(self) -> float:
        return float(self.mean.double().square().sum())

    def __repr__(self) -> str:
        return f"<Laplace posterior, prior precision {self.prior_precision:g}, of {self.matrix!r}>"


def _effective(values: Tensor, tau: float) -> float:
    return float((values / (values + tau)).sum())


def _likelihood(loss: Loss, noise: float) -> tuple[float, float]:
    """``s`` and ``c`` with ``-log p = s * loss + c`` for each term of the mean."""
    if isinstance(loss, SquareLoss):
        return 0.5 / noise**2, 0.5 * math.log(2 * math.pi * noise**2)
    if noise != 1.0:
        raise SettingError(
            f"noise is {noise:g} but {type(loss).__name__} has no noise of targets: leave it out, "
            "or use the square loss."
        )
    return 1.0, 0.0


def _closed(matrix: Operator) -> Structured:
    """With functions in closed form: as it is, or written out as one block."""
    if isinstance(matrix, Structured):
        return matrix
    whole = DenseBlocks(matrix.dense().unsqueeze(0))
    index = torch.arange(matrix.size, device=matrix.device)
    return Structured(matrix.problem, matrix.kind, {"": Placed(whole, index, Full())})
