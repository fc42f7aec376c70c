"""The Laplace posterior of a trained network: ``N(theta*, (N F + tau I)^-1)``.

The negative log posterior ``-log p(D | theta) + tau/2 |theta|²`` is replaced by its second-order
expansion at ``theta*``. ``-log p(D | theta) = s Σ_n loss_n + const``, where ``s`` is 1 for losses
of classes and ``1 / (2 noise²)`` for the square loss, so that the precision is ``s W F + tau I``
with the matrix ``F`` of the mean loss and ``W`` terms in that mean (MacKay 1992a; Ritter et al.
2018a with Kronecker factors).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.capture.discovery import StructureOf
from natgrad.checks import POSITIVE, check_whole, number
from natgrad.curvature.fisher import ExactFisher, Fisher
from natgrad.curvature.losses import Loss, SquareLoss
from natgrad.errors import SettingError
from natgrad.linalg.matrix_free import generator_of
from natgrad.linalg.results import Number
from natgrad.linalg.symmetric import DenseBlocks
from natgrad.measures.displaced_parameters import position
from natgrad.measures.matrix_choice import scale_of_sum
from natgrad.measures.predictive import Linearised, Prediction, Predictive, linearised
from natgrad.measures.temporary_weights import temporary_weights
from natgrad.operators import Operator, Problem, Structured, fisher
from natgrad.operators.structured import PlacedMatrix
from natgrad.structures import Full, Kronecker


@dataclass(frozen=True, eq=False)
class Laplace:
    """The Gaussian ``N(mean, precision^-1)`` with ``precision = scale * matrix + prior_precision *
    I``.

    Make one with ``Laplace.fit``, at the weights a training has ended with.

    Arguments:
        problem: model, loss and data.
        matrix: ``F`` of the mean loss, with functions in closed form.
        mean: ``theta* [P]``, the weights that were fitted at.
        scale: ``s W``, or ``(s W)²/N`` of an empirical Fisher: makes of ``F`` the Hessian of ``-log
            p(D | theta)``.
        log_likelihood: ``log p(D | theta*)``, in nats.
        prior_precision: ``tau > 0`` of a Gaussian prior around 0, ``1 / variance``.
        noise: standard deviation of the targets of a square loss; 1 for other losses.
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
        """Fit the posterior at the weights as they are, by a pass over the data for the matrix (two
        for EKFAC) and one for the loss.

        Arguments:
            model: the network, or a `Problem`, which brings loss, data and parameters along: leave
                these out then, since one given beside it raises `SettingError`. Dropout and
                BatchNorm must be in evaluation mode (``model.eval()``).
            loss: a `Loss`; torch's cross-entropy, square loss or binary cross-entropy with logits
                with ``reduction="mean"``, as a function, a module or a ``functools.partial``; or
                any function of (output, target) that returns the mean over the samples. Such a
                function has no Fisher matrix, except the empirical one, unless its second
                derivatives come with it, ``OwnLoss(function, output_hessian)``.
            data: one batch, or an iterable of batches that can be iterated again, such as a
                ``DataLoader``; an iterator is refused. A batch is ``(inputs, targets)``, where a
                tuple of inputs is passed as several arguments, or a mapping whose ``labels`` are
                the targets and whose other entries are keyword arguments of the model.
            structure: what is kept of the block of each layer, such as ``Kronecker()`` or
                ``Diagonal()``, or a function from layer to structure; ``None`` writes the whole
                matrix out, if it fits into 2 GiB.
            prior_precision: ``tau > 0`` of a Gaussian prior around 0, ``1 / variance``; `tuned`
                finds the best one afterwards.
            noise: standard deviation ``> 0`` of the targets of a square loss; with other losses
                only 1 is allowed.
            curvature: which Fisher matrix: ``ExactFisher()``, ``MonteCarloFisher(samples, seed)``
                or ``EmpiricalFisher()``.
            parameters: one pattern of parameter names (``fnmatch``, such as ``"head.*"``) or
                several, each of which must match a trainable parameter; ``None`` takes all
                trainable parameters. Those of the last layer are a common choice; all others are
                taken as certain.
            group: the processes among which the data are divided: a ``ProcessGroup``, a
                ``DeviceMesh`` or a `Communicator`; ``None`` takes all processes.
            progress: whether passes over the data that take more than a second show a progress bar
                (by ``rich``, if it is installed); ``None`` shows one if standard error is a
                terminal.
            check: whether it is tested, by two forward passes of the first batch, that the model is
                deterministic and a loss function of your own a mean over samples, and, for what is
                made layer by layer, that the layers' gradients are those of autograd.
        """
        options = {"parameters": parameters, "group": group, "progress": progress, "check": check}
        problem = Problem.of(model, loss, data, **options)
        prior_precision = number(prior_precision, "prior_precision", POSITIVE)
        share, constant = _likelihood(problem.loss, number(noise, "noise", POSITIVE))
        matrix = _in_closed_form(fisher(problem, curvature=curvature, structure=structure))
        scale = scale_of_sum(problem, curvature, share)
        log_likelihood = -problem.weight * (share * problem.value() + constant)
        mean = position(problem)
        return cls(problem, matrix, mean, scale, log_likelihood, prior_precision, noise)

    # Weights.

    def sample(self, n: int = 1, seed: int = 0) -> list[dict[str, Tensor]]:
        """Draws of all parameters by name, the same on every device and rank.

        Arguments:
            n: how many, at least 1; the first of many is the only one of one.
            seed: of the random numbers; the same seed gives the same result.
        """
        check_whole(n, "n", 1)
        generator, size = generator_of(seed), len(self.mean)
        # One at a time, so that the first of many is the only one of one.
        drawn = [torch.randn(size, generator=generator, dtype=torch.float64) for _ in range(n)]
        moved = self.root(torch.stack(drawn, 1).to(self.mean)) + self.mean.unsqueeze(1)
        return [self.problem.space.named(one.contiguous()) for one in moved.mT]

    def swapped(self, weights: Mapping[str, Tensor]) -> AbstractContextManager[None]:
        """A context in which the model has other weights.

        Arguments:
            weights: tensors by parameter name, such as one of `sample`; a name or shape that the
                posterior does not have raises.
        """
        return temporary_weights(self.problem.parameters, weights)

    def covariance(self, v: Tensor) -> Tensor:
        """``(precision)^-1 v``.

        Arguments:
            v: ``[P]`` or ``[P, k]``.
        """
        found: Tensor = self.matrix.solve(v, self.damping)
        return found / self.scale

    def root(self, v: Tensor) -> Tensor:
        """``(precision)^-1/2 v``, which turns white noise into draws around the mean.

        Arguments:
            v: ``[P]`` or ``[P, k]``.
        """
        found: Tensor = self.matrix.power(v, -0.5, self.damping)
        return found / math.sqrt(self.scale)

    @property
    def damping(self) -> float:
        """``precision = scale (matrix + damping I)``."""
        return self.prior_precision / self.scale

    # Predictions.

    def outputs(self, inputs: Any) -> tuple[Tensor, Tensor]:
        """The Gaussian of the linearised model's outputs: mean ``[n, …]`` and covariance
        ``[n, D, D]`` over the D outputs of a sample, without the noise of targets.

        Arguments:
            inputs: what the model is called with, for ``n`` samples: a tensor, a tuple of arguments
                or a mapping of keywords. Their Jacobian ``[n D, P]`` must fit into 2 GiB.
        """
        f, roots = linearised(self, inputs)
        return f, roots @ roots.mT

    def predict(
        self,
        inputs: Any,
        by: Predictive = Linearised(),  # noqa: B008 (frozen)
    ) -> Prediction:
        """Mean and variance of the targets of new inputs, for a cross-entropy, a binary
        cross-entropy or a square loss; other losses raise.

        Arguments:
            inputs: what the model is called with, for ``n`` samples: a tensor, a tuple of arguments
                or a mapping of keywords.
            by: ``Linearised()``, in closed form, or ``MonteCarlo(samples, seed)``, the mean over
                networks that are drawn.
        """
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


def _in_closed_form(matrix: Operator) -> Structured:
    """With functions in closed form: as it is, or written out as one block."""
    if isinstance(matrix, Structured):
        return matrix
    whole = DenseBlocks(matrix.dense().unsqueeze(0))
    index = torch.arange(matrix.size, device=matrix.device)
    return Structured(matrix.problem, matrix.kind, {"": PlacedMatrix(whole, index, Full())})
