"""A PAC-Bayes bound: noisy weights, ``Q = N(θ, diag σ_i²)``, and their distance from a prior.

The bound is that of McAllester 1999, computed for networks as in Dziugaite and Roy 2017; noise in
proportion to the weights is from Jiang et al. 2020. The more noise the weights
bear, the fewer bits they hold: ``KL(Q ‖ P)`` with ``P = N(θ₀, τ²)`` bounds by how much the error of
noisy weights on other data exceeds that on the N samples (`bounds`). It is a guarantee, useful if
it is what training aims at; after plain training it is one of the measures that follow
generalisation best.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from natgrad.checks import POSITIVE, number
from natgrad.errors import SettingError
from natgrad.linalg.results import Number
from natgrad.measures.bounds import best_prior_scale, catoni, gaussian_kl, mcallester, seeger
from natgrad.measures.classes import Error, mistakes
from natgrad.measures.displaced_parameters import Weights
from natgrad.measures.noisy_loss import Isotropic, Posterior, WeightDraws, search
from natgrad.operators import Problem
from natgrad.tables import Column, Table


@dataclass(frozen=True)
class PacBayes:
    """PAC-Bayes bounds, and what they are made of. The bounds are at the mean of ``noisy_error``,
    whose standard error they do not contain.

    Arguments:
        sigma: size of the noise of the posterior: its standard deviation, or, for `MagnitudeAware`,
            relative to how far a weight has moved.
        prior_sigma: ``τ``, standard deviation of the prior.
        kl: ``KL(Q ‖ P)`` in nats, with what the choice of ``prior_sigma`` costs.
        loss: of the weights as they are.
        noisy_loss: mean over draws of the weights.
        error: of the weights as they are.
        noisy_error: mean over draws of the weights, which the bounds start from.
        samples: ``N``.
        delta: ``δ``, between 0 and 1: the chance, over the draw of the samples, that the bound does
            not hold.
        mcallester: upper bound on the error of noisy weights on other data, at most 1.
        seeger: likewise, never above ``mcallester``.
        catoni: likewise, with the given ``temperature``.
    """

    sigma: float
    prior_sigma: float
    kl: float
    loss: float
    noisy_loss: Number
    error: float
    noisy_error: Number
    samples: int
    delta: float
    mcallester: float
    seeger: float
    catoni: float

    @property
    def flatness(self) -> float:
        """``1/σ²``."""
        return self.sigma**-2

    def table(self) -> Table:
        rows = (
            ("noise σ", f"{self.sigma:.4g}"),
            ("prior τ", f"{self.prior_sigma:.4g}"),
            ("KL(Q ‖ P)", f"{self.kl:.4g}"),
            ("loss", f"{self.loss:.4g}"),
            ("loss with noise", str(self.noisy_loss)),
            ("error", f"{self.error:.4g}"),
            ("error with noise", str(self.noisy_error)),
            ("McAllester's bound", f"{self.mcallester:.4g}"),
            ("Seeger's bound", f"{self.seeger:.4g}"),
            ("Catoni's bound", f"{self.catoni:.4g}"),
        )
        footer = f"{self.samples:,} samples, with probability {1 - self.delta:g}"
        return Table("PAC-Bayes", (Column(""), Column("value", "right")), rows, footer)

    def __str__(self) -> str:
        return str(self.table())


def pac_bayes(
    model: nn.Module | Problem,
    loss: Any = None,
    data: Any = None,
    *,
    parameters: Iterable[str] | str | None = None,
    posterior: Posterior = Isotropic(),  # noqa: B008 (frozen)
    prior: Weights = None,
    prior_sigma: float | None = None,
    tolerance: float = 0.1,
    error: Error | None = None,
    samples: int = 16,
    delta: float = 0.05,
    temperature: float = 1.0,
    seed: int = 0,
) -> PacBayes:
    """Bounds on the error of noisy weights on other data.

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
        posterior: ``Isotropic(sigma)`` or ``MagnitudeAware(sigma)``; without a ``sigma`` the
            largest one that is tolerated is searched for.
        prior: ``θ₀``, the initial weights as a model or a state dict; ``None`` is zeros.
        prior_sigma: ``τ > 0``, standard deviation of the prior, if it was fixed before the data
            were seen; ``None`` takes the best one of a grid and adds the price of choosing it to
            KL.
        tolerance: ``> 0``, by how much the error may rise where ``sigma`` is searched for.
        error: a function ``(output, target) -> [n]`` with values from 0 to 1; ``None`` is the share
            of wrong answers, for which the loss must be a cross-entropy.
        samples: number of draws of the weights, at least 2.
        delta: ``δ``, between 0 and 1: the chance, over the draw of the samples, that the bound does
            not hold.
        temperature: ``β > 0`` of Catoni's bound, chosen before the data were seen.
        seed: of the random numbers; the same seed gives the same result.
    """
    problem = Problem.of(model, loss, data, parameters=parameters)
    cloud = WeightDraws(problem, posterior, prior, samples, seed, error or mistakes(problem.loss))
    sigma = posterior.sigma or search(cloud, tolerance).sigma
    scales = cloud.scales(sigma)
    tau, cost = best_prior_scale(cloud.distance, scales)
    if prior_sigma is not None:
        tau, cost = number(prior_sigma, "prior_sigma", POSITIVE), 0.0
    kl = gaussian_kl(cloud.distance, scales, tau) + cost
    calm, noisy = cloud.calm(), cloud.at(sigma)
    assert noisy.error is not None
    mean, n = float(noisy.error), problem.samples
    if not 0 <= mean <= 1:
        raise SettingError(
            f"The mean error is {mean:.3g}, but PAC-Bayes bounds are of errors from 0 to 1: clip "
            "or rescale what error(output, target) returns."
        )
    return PacBayes(
        sigma,
        tau,
        kl,
        calm[0],
        noisy.loss,
        calm[1],
        noisy.error,
        n,
        delta,
        mcallester(mean, kl, n, delta),
        seeger(mean, kl, n, delta),
        catoni(mean, kl, n, delta, temperature),
    )
