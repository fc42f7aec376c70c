"""The loss of noisy weights, ``E L(θ + σ_i z_i)``, ``z ~ N(0, 1)``, and how much noise it bears.

Neyshabur et al. 2017.

``1/σ²`` at the largest ``σ`` that leaves the loss within a tolerance is a sharpness that looks in
all directions, where `sharpness` looks in the worst one.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, isnan
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.checks import POSITIVE, check_numbers, check_whole, number
from natgrad.errors import SettingError
from natgrad.linalg.results import Number
from natgrad.measures.classes import Error
from natgrad.measures.displaced_parameters import Weights, displaced, flat_weights, position
from natgrad.operators import Problem

_FINEST, _COARSEST = 2.0**-40, 2.0**20  # of σ, in a search
_RATIO = 1.02  # of the σ that is too much to that which is not, at the end


@dataclass(frozen=True)
class Posterior(ABC):
    """How noise is spread over the weights.

    Arguments:
        sigma: the size of the noise, ``> 0``; ``None`` lets `pac_bayes` search for the largest that
            is tolerated. `tolerated_sigma` always searches.
    """

    sigma: float | None = None

    def __post_init__(self) -> None:
        if self.sigma is not None:
            number(self.sigma, f"{type(self).__name__}.sigma", POSITIVE)

    @abstractmethod
    def scales(self, sigma: float, distance: Tensor) -> Tensor:
        """Standard deviations ``σ_i [P]``.

        Arguments:
            sigma: the size of the noise.
            distance: ``θ - θ₀ [P]``, how far the weights are from the prior's.
        """


@dataclass(frozen=True)
class Isotropic(Posterior):
    """The same for all weights: ``σ_i = σ``."""

    def scales(self, sigma: float, distance: Tensor) -> Tensor:
        return torch.full_like(distance, sigma)


@dataclass(frozen=True)
class MagnitudeAware(Posterior):
    """More for weights that have moved far: ``σ_i² = σ² (θ_i - θ₀_i)² + floor²``.

    Arguments:
        floor: ``> 0``, the noise of weights that have not moved.
        sigma: the size of the noise relative to the distance that a weight has moved, ``> 0``;
            ``None`` lets `pac_bayes` search for the largest that is tolerated.
    """

    floor: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, floor=POSITIVE)

    def scales(self, sigma: float, distance: Tensor) -> Tensor:
        return (distance.square() * sigma**2 + self.floor**2).sqrt()


@dataclass(frozen=True)
class Noisy:
    """Means over draws of the weights, with their standard errors.

    Arguments:
        loss: the mean loss.
        error: the mean error; ``None`` if no error was asked for.
    """

    loss: Number
    error: Number | None

    @property
    def watched(self) -> Number:
        """The error, or the loss without one."""
        return self.loss if self.error is None else self.error


class WeightDraws:
    """Draws of weights around those of the model, the same ones at every ``σ``.

    Arguments:
        problem: model, loss and data.
        posterior: how the noise is spread.
        prior: ``θ₀``, the initial weights as a model or a state dict; ``None`` is zeros.
        samples: number of draws of the weights, at least 2.
        seed: of the random numbers; the same seed gives the same result.
        error: a function ``(output, target) -> [n]``, one number a sample; ``None`` looks at the
            loss alone.
    """

    def __init__(
        self,
        problem: Problem,
        posterior: Posterior,
        prior: Weights,
        samples: int,
        seed: int,
        error: Error | None,
    ) -> None:
        check_whole(samples, "samples", 2)
        check_whole(seed, "seed", 0)
        if not isinstance(posterior, Posterior):
            raise SettingError(
                f"posterior is {posterior!r} but must say how noise is spread over weights: give "
                "Isotropic() or MagnitudeAware()."
            )
        self.problem, self.posterior, self.error = problem, posterior, error
        self.samples, self.seed = samples, seed
        self.distance = position(problem) - flat_weights(prior, problem, "prior")

    def scales(self, sigma: float) -> Tensor:
        """Standard deviations ``[P]`` of the weights.

        Arguments:
            sigma: the size of the noise.
        """
        return self.posterior.scales(sigma, self.distance)

    def calm(self) -> tuple[float, float]:
        """Loss and error without noise."""
        return _pass(self.problem, self.error)

    def at(self, sigma: float) -> Noisy:
        """Loss and error with noise, each as a mean over the draws.

        Arguments:
            sigma: the size of the noise.
        """
        scales = self.scales(sigma)
        generator = torch.Generator().manual_seed(self.seed)
        found = []
        for _ in range(self.samples):
            z = torch.randn(len(scales), generator=generator, dtype=torch.float64).to(scales)
            with displaced(self.problem, scales * z):
                found.append(_pass(self.problem, self.error))
        losses, errors = (
            _mean(torch.tensor(column, dtype=torch.float64)) for column in zip(*found, strict=True)
        )
        return Noisy(losses, None if self.error is None else errors)


@dataclass(frozen=True)
class Tolerated:
    """The largest noise that leaves the loss or error within a tolerance.

    Arguments:
        sigma: its size.
        calm: the loss without noise, or the error that was looked at instead.
        noisy: the same with noise, a mean over draws of the weights.
        tolerance: the rise that was allowed.
    """

    sigma: float
    calm: float
    noisy: Number
    tolerance: float

    @property
    def flatness(self) -> float:
        """``1/σ²``: smaller is flatter."""
        return self.sigma**-2

    def __float__(self) -> float:
        return self.sigma

    def __str__(self) -> str:
        return (
            f"noise of σ = {self.sigma:.4g} is tolerated: {self.calm:.6g} becomes {self.noisy} "
            f"(at most {self.tolerance:g} more)"
        )


def tolerated_sigma(
    model: nn.Module | Problem,
    loss: Any = None,
    data: Any = None,
    *,
    parameters: Iterable[str] | str | None = None,
    tolerance: float = 0.1,
    of: Error | None = None,
    posterior: Posterior = Isotropic(),  # noqa: B008 (frozen)
    prior: Weights = None,
    samples: int = 16,
    seed: int = 0,
) -> Tolerated:
    """The largest ``σ``, to 2%, with which the mean loss rises by ``tolerance`` at most.

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
        tolerance: ``> 0``, the rise that is allowed, in units of the loss, or of ``of``; one that
            no noise exceeds, or any noise does, raises.
        of: a function ``(output, target) -> [n]`` whose mean over samples is looked at in place of
            the loss, such as ``mistakes(F.cross_entropy)``; ``None`` looks at the loss.
        posterior: how the noise is spread over the weights: ``Isotropic()`` or
            ``MagnitudeAware(floor=...)``, whose ``sigma`` is not used.
        prior: ``θ₀``, the initial weights as a model or state dict; ``None`` is zeros. Only
            ``MagnitudeAware()`` uses it.
        samples: number of draws of the weights, at least 2; each is a pass over the data for every
            ``σ`` that is tried.
        seed: of the random numbers; the same seed gives the same result.
    """
    problem = Problem.of(model, loss, data, parameters=parameters)
    return search(WeightDraws(problem, posterior, prior, samples, seed, of), tolerance)


def search(cloud: WeightDraws, tolerance: float) -> Tolerated:
    """The largest ``σ`` within the tolerance, to 2%: doubling or halving until it lies between two,
    then bisection of the logarithm.

    Arguments:
        cloud: gives the loss or the error at a ``σ``.
        tolerance: ``> 0``, the rise that is allowed.
    """
    tolerance = number(tolerance, "tolerance", POSITIVE)
    calm = cloud.calm()[0 if cloud.error is None else 1]
    seen: dict[float, Number] = {}

    def fits(sigma: float) -> bool:
        seen[sigma] = cloud.at(sigma).watched
        return float(seen[sigma]) - calm <= tolerance

    low = high = 2.0**-4
    if fits(low):
        while fits(high := 2 * low):
            low = high
            if high >= _COARSEST:
                raise SettingError(
                    f"Noise of σ = {high:g} makes {calm:.3g} to {float(seen[high]):.3g}, which is "
                    f"within the tolerance of {tolerance:g}, so that none is too much: give a "
                    "smaller tolerance."
                )
    else:
        while not fits(low := high / 2):
            high = low
            if low <= _FINEST:
                raise SettingError(
                    f"Noise of σ = {low:.1g} makes {calm:.3g} to {float(seen[low]):.3g}, which is "
                    f"more than the tolerance of {tolerance:g}, so that any is too much: give a "
                    "larger tolerance, or a smaller floor to MagnitudeAware()."
                )
    while high / low > _RATIO:
        middle = (low * high) ** 0.5
        if fits(middle):
            low = middle
        else:
            high = middle
    return Tolerated(low, calm, seen[low], tolerance)


@torch.no_grad()
def _pass(problem: Problem, error: Error | None) -> tuple[float, float]:
    """Mean loss, and mean of ``error`` over samples."""
    total = torch.zeros(4, dtype=torch.float64)
    for batch in problem.batches("noisy loss"):
        output = problem.output(batch)
        total[0] += float(problem.loss.total(output, batch.targets))
        total[1] += float(problem.loss.weight(output, batch.targets))
        total[2] += batch.samples
        if error is not None:
            found = error(output, batch.targets)
            if not isinstance(found, Tensor) or found.shape != (batch.samples,):
                given = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
                raise SettingError(
                    f"The error function returned {given} for {batch.samples} samples but must "
                    f"return one number for each, a tensor of shape [{batch.samples}]: leave out "
                    "the mean."
                )
            total[3] += float(found.double().sum())
    loss, weight, samples, errors = problem.totals(total).tolist()
    value = loss / weight
    return (inf if isnan(value) else value), errors / samples


def _mean(each: Tensor) -> Number:
    error = float(each.std()) / len(each) ** 0.5 if bool(each.isfinite().all()) else inf
    return Number(float(each.mean()), f"{len(each)} draws of noisy weights", error)
