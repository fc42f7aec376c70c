"""Which output vectors a matrix sums, ``scale Σ_n Σ_q (J_nᵀ v_nq)(J_nᵀ v_nq)ᵀ``.

GGN and exact Fisher: the roots of the output Hessian; Monte-Carlo: gradients at drawn targets;
empirical: the gradient at the targets.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from natgrad.curvature.fisher import EmpiricalFisher, ExactFisher, Fisher, MonteCarloFisher
from natgrad.curvature.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood
from natgrad.curvature.losses import BinaryCrossEntropy, CrossEntropy, Loss, SquareLoss
from natgrad.errors import SettingError
from natgrad.operators.data import Batch
from natgrad.operators.problem import Problem

_NUMBERS = 1 << 22  # of stacked output vectors at a time


class Vectors(ABC):
    """Which output vectors ``v_nq`` a matrix sums."""

    @abstractmethod
    def per_sample(self, loss: Loss, output: Tensor) -> int:
        """How many vectors each sample has.

        Arguments:
            loss: of the problem.
            output: of the model for a batch, ``[n, …]``.
        """

    @abstractmethod
    def stacks(self, loss: Loss, output: Tensor, batch: Batch, index: int) -> Iterator[Tensor]:
        """``[q, n, …]``, all vectors of a batch, some at a time.

        Arguments:
            loss: of the problem.
            output: of the model for a batch, ``[n, …]``.
            batch: that the output is of.
            index: number of the batch within a pass over the data, which fixes what is drawn at
                random for it.
        """

    def curve(self, loss: Loss, output: Tensor, batch: Batch, index: int, u: Tensor) -> Tensor:
        """``Σ_q v_nq (v_nqᵀ u_n)``.

        Arguments:
            loss: of the problem.
            output: of the model for a batch, ``[n, …]``.
            batch: that the output is of.
            index: number of the batch within a pass over the data, which fixes what is drawn at
                random for it.
            u: ``[k, n, …]``: ``k`` tensors shaped like the output.
        """
        out = torch.zeros_like(u)
        for v in self.stacks(loss, output, batch, index):
            rows = v.flatten(2)  # [q, n, d]
            inner = torch.einsum("qnd,knd->kqn", rows, u.flatten(2))
            out += torch.einsum("kqn,qnd->knd", inner, rows).view_as(u)
        return out

    def scale(self, problem: Problem) -> float:
        """What the sum over all data is multiplied by: here ``1 / W``.

        Arguments:
            problem: has ``W``, what the sum of all losses is divided by.
        """
        return 1.0 / problem.weight


@dataclass(frozen=True)
class Roots(Vectors):
    """Everything, so that the sum is the output Hessian itself."""

    def per_sample(self, loss: Loss, output: Tensor) -> int:
        return loss.passes(output)

    def stacks(self, loss: Loss, output: Tensor, batch: Batch, index: int) -> Iterator[Tensor]:
        f = output.detach()
        at_once = max(1, _NUMBERS // max(1, f.numel()))
        if loss.passes(f) <= at_once:
            yield loss.stacked_roots(f, batch.targets)
            return
        roots = loss.roots(f, batch.targets)
        while some := list(islice(roots, at_once)):
            yield torch.stack(some)

    def curve(self, loss: Loss, output: Tensor, batch: Batch, index: int, u: Tensor) -> Tensor:
        return loss.curve(output.detach(), batch.targets, u)


@dataclass(frozen=True)
class Draws(Vectors):
    """Gradients at drawn targets, the same at every pass over the data as long as batches come in
    the same order.

    Arguments:
        samples: draws for every sample, each scaled by ``samples^-½``.
        seed: of the random numbers; the same seed gives the same result.
        streams: number of processes, each of which draws from a stream of its own.
        stream: number of this process.
    """

    samples: int
    seed: int
    streams: int = 1  # processes, which draw apart
    stream: int = 0

    def per_sample(self, loss: Loss, output: Tensor) -> int:
        return self.samples

    def stacks(self, loss: Loss, output: Tensor, batch: Batch, index: int) -> Iterator[Tensor]:
        f = output.detach()
        own = MonteCarloFisher(self.samples, self.seed)
        generator = own.generator(f.device, index * self.streams + self.stream)
        at_once = max(1, _NUMBERS // max(1, f.numel()))
        for start in range(0, self.samples, at_once):
            count = min(at_once, self.samples - start)
            drawn = [loss.draw(f, batch.targets, generator) for _ in range(count)]
            yield torch.stack(drawn).mul_(self.samples**-0.5)


@dataclass(frozen=True)
class LossGradients(Vectors):
    """Of each sample's loss. ``C = N/W² Σ s_n s_nᵀ``, the second moment of ``l_n = N/W s_n``."""

    def per_sample(self, loss: Loss, output: Tensor) -> int:
        return 1

    def stacks(self, loss: Loss, output: Tensor, batch: Batch, index: int) -> Iterator[Tensor]:
        f = output.detach().requires_grad_()
        with torch.enable_grad():
            (v,) = torch.autograd.grad(loss.total(f, batch.targets), f)
        yield v.unsqueeze(0)

    def scale(self, problem: Problem) -> float:
        return problem.samples / problem.weight**2


def vectors_of(curvature: Fisher, problem: Problem) -> Vectors:
    """The vectors of a Fisher matrix.

    Arguments:
        curvature: ``ExactFisher()``, ``MonteCarloFisher(samples, seed)`` or ``EmpiricalFisher()``;
            its likelihood, if it is not the default, must be that of the loss.
        problem: model, loss and data.
    """
    if isinstance(curvature, EmpiricalFisher):
        return LossGradients()
    if isinstance(curvature, MonteCarloFisher | ExactFisher):
        _check_likelihood(curvature.likelihood, problem.loss)
    if isinstance(curvature, MonteCarloFisher):
        problem.data.refuse_shuffled("every pass would draw for other samples")
        comm = problem.comm
        return Draws(curvature.samples, curvature.seed, comm.size, comm.rank)
    if isinstance(curvature, ExactFisher):
        return Roots()
    raise SettingError(
        f"curvature is {curvature!r} but must be ExactFisher(), MonteCarloFisher(samples, seed) or "
        "EmpiricalFisher(): give one of them."
    )


def _check_likelihood(given: Likelihood, loss: Loss) -> None:
    """The loss says what the likelihood is; one that was named must be that."""
    own = {CrossEntropy: Categorical, SquareLoss: Gaussian, BinaryCrossEntropy: Bernoulli}
    known = own.get(type(loss))
    if given != Categorical() and known is not None and not isinstance(given, known):
        raise SettingError(
            f"The likelihood is {given!r} but that of {type(loss).__name__} is {known.__name__}: "
            "leave it out."
        )
