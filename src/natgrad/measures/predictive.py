"""What a posterior over weights says of new inputs.

linearised   ``f ~ N(f(x, theta*), J S Jᵀ)`` with the Jacobian ``J`` at ``theta*`` and ``S`` the
             covariance of weights; probabilities ``softmax(f / sqrt(1 + pi v / 8))`` (MacKay 1992b)
Monte-Carlo  ``mean_k p(y | x, theta_k)`` over weights ``theta_k`` that are drawn
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import pi
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from natgrad.checks import check_whole
from natgrad.comm import Alone
from natgrad.curvature.losses import BinaryCrossEntropy, CrossEntropy, Loss, SquareLoss
from natgrad.errors import SettingError
from natgrad.operators import Problem, requirements
from natgrad.operators.data import Batch, read
from natgrad.operators.jacobian import jacobian

if TYPE_CHECKING:
    from natgrad.measures.laplace import Laplace


@dataclass(frozen=True, eq=False)
class Prediction:
    """What is predicted for the target of each output.

    For classes the target is 1 for the class and 0 for others, so that the mean is the probability
    ``p`` and the variance ``p (1 - p)``. For a square loss the noise is in the variance.

    Arguments:
        mean: ``[n, …]``, in the shape of the model's output: of classes the probability of each.
        variance: ``[n, …]``, of the target, in the same shape.
    """

    mean: Tensor
    variance: Tensor


class Predictive(ABC):
    @abstractmethod
    def __call__(self, posterior: Laplace, inputs: Any) -> Prediction:
        """``inputs`` as the model is called with: a tensor, a tuple, or a mapping of keywords."""


@dataclass(frozen=True)
class Linearised(Predictive):
    """Of the model's first-order expansion, for which the posterior is a posterior; in closed form.

    Probabilities are the probit approximation, which looks at the variance of each output alone.
    """

    def __call__(self, posterior: Laplace, inputs: Any) -> Prediction:
        loss = posterior.problem.loss
        check_targets(loss)
        f, roots = linearised(posterior, inputs)
        variance = roots.square().sum(-1).view(f.shape)
        if isinstance(loss, SquareLoss):
            return Prediction(f, variance + posterior.noise**2)
        return _of_classes(probabilities(loss, f / (1 + pi / 8 * variance).sqrt()))


@dataclass(frozen=True)
class MonteCarlo(Predictive):
    """The mean prediction of networks with weights drawn from the posterior; the error falls as
    ``samples^-1/2``.

    Arguments:
        samples: number of networks that are drawn, at least 1, each one forward pass.
        seed: of the random numbers; the same seed gives the same result.
    """

    samples: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole(self.samples, "MonteCarlo.samples", 1)

    @torch.no_grad()
    def __call__(self, posterior: Laplace, inputs: Any) -> Prediction:
        loss = posterior.problem.loss
        check_targets(loss)
        batch = _batch(inputs)
        found: list[Tensor] = []
        for weights in posterior.sample(self.samples, self.seed):
            with posterior.swapped(weights):
                f = posterior.problem.output(batch)
            found.append(f if isinstance(loss, SquareLoss) else probabilities(loss, f))
        stacked = torch.stack(found)
        mean = stacked.mean(0)
        if isinstance(loss, SquareLoss):
            return Prediction(mean, stacked.var(0, correction=0) + posterior.noise**2)
        return _of_classes(mean)


def linearised(posterior: Laplace, inputs: Any) -> tuple[Tensor, Tensor]:
    """Outputs ``[n, …]`` at the mean, and roots ``[n, D, P]`` of their covariances
    ``roots rootsᵀ``.

    Arguments:
        posterior: over the weights.
        inputs: what the model is called with, for ``n`` samples.
    """
    problem = posterior.problem
    space = problem.space
    with posterior.swapped(space.named(posterior.mean)):
        with torch.no_grad():
            f = problem.output(_batch(inputs))
        what = "The Jacobian of these inputs"
        requirements.fits(f.numel(), space.size, f.dtype, what, "predict fewer of them at a time")
        # Other processes may predict other inputs, or none.
        here = Problem(
            problem.model,
            SquareLoss(),
            (inputs, f),
            parameters=space.names,
            group=Alone(),
            progress=False,
            check=False,
        )
        rows = torch.cat(list(jacobian(here).rows()))
    roots = posterior.root(rows.mT.to(posterior.mean)).mT
    return f, roots.reshape(len(f), -1, space.size)


def check_targets(loss: Loss) -> None:
    """Refuse losses whose targets have no mean and variance here.

    Arguments:
        loss: of the posterior.
    """
    if not isinstance(loss, CrossEntropy | BinaryCrossEntropy | SquareLoss):
        raise SettingError(
            f"{type(loss).__name__} does not say how targets are distributed: use outputs(inputs), "
            "or sample() and temporary_weights()."
        )


def probabilities(loss: Loss, f: Tensor) -> Tensor:
    """Probabilities ``[n, …]``: of the classes by softmax, of yes-or-no answers by sigmoid.

    Arguments:
        loss: a `CrossEntropy`, which says where the classes are, or a `BinaryCrossEntropy`.
        f: logits ``[n, …]``.
    """
    return f.softmax(loss.class_axis) if isinstance(loss, CrossEntropy) else f.sigmoid()


def _of_classes(p: Tensor) -> Prediction:
    return Prediction(p, p * (1 - p))


def _batch(inputs: Any) -> Batch:
    return read((inputs, None))
