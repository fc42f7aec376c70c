"""A PAC-Bayes bound: noisy weights, ``Q = N(θ, diag σ_i²)``, and their distance from a prior (Y25).

[McAllester, PAC-Bayesian model averaging, 1999; Dziugaite and Roy, Computing nonvacuous
generalization bounds for deep (stochastic) neural networks, 2017; Jiang et al., Fantastic
generalization measures, 2020, also for noise in proportion to weights.] The more noise the weights
bear, the fewer bits they hold: ``KL(Q ‖ P)`` with ``P = N(θ₀, τ²)`` bounds by how much the error of
noisy weights on other data exceeds that on the N samples (`bounds`). It is a guarantee, useful if
it is what training aims at; after plain training it is one of the measures that follow
generalisation best.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from natgrad.errors import SettingError
from natgrad.linalg.results import Number
from natgrad.measures.bounds import best_prior_scale, catoni, gaussian_kl, mcallester, seeger
from natgrad.measures.classes import Error, mistakes
from natgrad.measures.moved import Weights
from natgrad.measures.noisy_loss import Cloud, Isotropic, Posterior, search
from natgrad.operators import Problem
from natgrad.runtime.ranges import POSITIVE, number
from natgrad.tables import Column, Table


@dataclass(frozen=True)
class PacBayes:
    """``kl`` contains what the choice of ``prior_sigma`` costs. The bounds are at the mean error of
    ``noisy_error``, whose standard error they do not contain."""

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
    """The error that is bounded is the share of wrong answers, or ``error(output, target) -> [n]``
    with values from 0 to 1.

    ``posterior`` without a ``sigma`` gets the largest with which the error rises by ``tolerance``
    at most. ``prior``: the initial weights as a model or state dict, zeros for ``None``.
    ``prior_sigma``: ``τ`` as fixed before the data were seen; else the best one, paid for.
    ``samples`` is the number of draws of weights, ``temperature`` is Catoni's ``β``.
    """
    problem = Problem.of(model, loss, data, parameters=parameters)
    cloud = Cloud(problem, posterior, prior, samples, seed, error or mistakes(problem.loss))
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
