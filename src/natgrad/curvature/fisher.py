"""Which output gradients the Fisher matrix averages, ``F = mean over samples of Σ v vᵀ``.

Each variant yields the vectors ``v`` to backpropagate from the network's output, scaled so that
their outer products just sum.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from natgrad.curvature.likelihoods import Categorical, Likelihood
from natgrad.errors import SettingError


class Fisher(ABC):
    """``observes`` says whether the output must be shown before the loss's backward pass,
    ``of_residuals`` that it is residuals that are shown, by ``kfac.residuals``."""

    observes: ClassVar[bool] = True
    of_residuals: ClassVar[bool] = False

    @abstractmethod
    def vectors(
        self,
        output: Tensor,
        targets: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:
        """Vectors shaped like ``output``, in float32, or float64 when the output is. The empirical
        Fisher has none of its own: it is taken from the backward pass of the loss.

        Arguments:
            output: the network's output, ``[n, …]``; its graph is not used.
            targets: of the samples; they only say which positions count
                (`Categorical.ignore_index`). ``None`` counts all.
            generator: of the random numbers, on the output's device, for variants that draw;
                `MonteCarloFisher` raises without one. Others do not use it.
        """

    @abstractmethod
    def passes(self, output: Tensor) -> int:
        """How many vectors there are: backward passes beyond the training one.

        Arguments:
            output: the network's output, ``[n, …]``.
        """


@dataclass(frozen=True)
class EmpiricalFisher(Fisher):
    """``v = ∂(-log p(y | f))/∂f`` at the targets of the data (Osawa 2019, eq. 3)."""

    observes: ClassVar[bool] = False

    def vectors(
        self,
        output: Tensor,
        targets: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:
        return iter(())

    def passes(self, output: Tensor) -> int:
        return 0


@dataclass(frozen=True)
class MonteCarloFisher(Fisher):
    """``v`` at targets drawn from the model's own prediction, each scaled by ``samples^-½``.

    Unbiased, with an error that falls as ``samples^-½`` (Yokota 2022).

    Arguments:
        samples: draws for every sample, at least 1, each a further backward pass.
        seed: ``≥ 0``, of the draws.
        likelihood: what the output says about the target: `Categorical`, `Gaussian` or `Bernoulli`.
            For `natgrad.fisher` the loss says it, and this is left out.
    """

    samples: int = 1
    seed: int = 0
    likelihood: Likelihood = field(default_factory=Categorical)

    def __post_init__(self) -> None:
        for name, low in (("samples", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise SettingError(
                    f"MonteCarloFisher.{name} is {value!r} but must be a whole number of at least "
                    f"{low}: pass such an int."
                )
        _check_likelihood(self)

    def generator(self, device: torch.device | str, stream: int = 0) -> torch.Generator:
        """A generator of its own for each ``stream``, so that ranks draw independently.

        Arguments:
            device: of the output.
            stream: number that tells generators with one seed apart, such as that of the rank.
        """
        # An odd factor maps streams one to one to the 32 bits that the CPU's generator reads.
        seed = (self.seed + 0x9E3779B1 * stream) % 2**32
        return torch.Generator(device).manual_seed(seed)

    def vectors(
        self,
        output: Tensor,
        targets: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:
        if generator is None:
            raise SettingError(
                "MonteCarloFisher got None as generator but draws from one that is kept between "
                "steps: make it once with .generator(device) and pass it each time."
            )
        scale = self.samples**-0.5
        draws = (self.likelihood.sample(output, generator, targets) for _ in range(self.samples))
        return (draw.mul_(scale) for draw in draws)

    def passes(self, output: Tensor) -> int:
        return self.samples


@dataclass(frozen=True)
class ExactFisher(Fisher):
    """The expectation over all targets that the model may predict, without noise: a backward pass
    for every output entry (Yokota 2022).

    Arguments:
        likelihood: what the output says about the target: `Categorical`, `Gaussian` or `Bernoulli`.
            For `natgrad.fisher` the loss says it, and this is left out.
    """

    likelihood: Likelihood = field(default_factory=Categorical)

    def __post_init__(self) -> None:
        _check_likelihood(self)

    def vectors(
        self,
        output: Tensor,
        targets: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:
        return self.likelihood.exact(output, targets)

    def passes(self, output: Tensor) -> int:
        return self.likelihood.passes(output)


def _check_likelihood(owner: MonteCarloFisher | ExactFisher) -> None:
    if not isinstance(owner.likelihood, Likelihood):
        raise SettingError(
            f"{type(owner).__name__}.likelihood is {owner.likelihood!r} but must be a likelihood: "
            "pass Categorical(), Gaussian() or Bernoulli()."
        )
