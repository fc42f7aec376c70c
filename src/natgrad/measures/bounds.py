"""PAC-Bayes bounds on the error of a random predictor, from that on N samples and ``KL(Q ‖ P)``.

With probability ``1 - delta`` over the samples, for every ``Q`` at once and losses from 0 to 1::

    McAllester   e + √((KL + ln(2√N/δ)) / 2N)
    Seeger       the largest q with kl(e ‖ q) ≤ (KL + ln(2√N/δ)) / N
    Catoni       (1 - exp(-β e - (KL + ln(1/δ)) / N)) / (1 - exp(-β)),  β fixed beforehand

McAllester 1999 and Seeger 2002, with the constant of Maurer 2004; Catoni 2007. Seeger's is never
above McAllester's, and far below it for small errors.
"""

from math import exp, expm1, log, sqrt

import torch
from torch import Tensor

from natgrad.checks import NOT_NEGATIVE, POSITIVE, Range, check_whole, number

_UNIT = Range(0, 1)
_INSIDE = Range(0, 1, open_low=True, open_high=True)


def mcallester(error: float, kl: float, samples: int, delta: float = 0.05) -> float:
    """McAllester's bound, cut off at 1.

    Arguments:
        error: on the samples: the mean of losses from 0 to 1, such as the share of wrong answers.
        kl: ``KL(Q ‖ P) ≥ 0``, in nats.
        samples: ``N``, their number.
        delta: ``δ``, between 0 and 1: the chance, over the draw of the samples, that the bound does
            not hold.
    """
    budget = _budget(error, kl, samples, delta)
    return min(1.0, error + sqrt(budget / 2))


def seeger(error: float, kl: float, samples: int, delta: float = 0.05) -> float:
    """Seeger's bound, by bisection of ``kl(e ‖ q) = e ln(e/q) + (1-e) ln((1-e)/(1-q))`` over q.

    Arguments:
        error: on the samples: the mean of losses from 0 to 1, such as the share of wrong answers.
        kl: ``KL(Q ‖ P) ≥ 0``, in nats.
        samples: ``N``, their number.
        delta: ``δ``, between 0 and 1: the chance, over the draw of the samples, that the bound does
            not hold.
    """
    budget = _budget(error, kl, samples, delta)
    low, high = error, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        if binary_kl(error, middle) > budget:
            high = middle
        else:
            low = middle
    return high


def catoni(
    error: float, kl: float, samples: int, delta: float = 0.05, temperature: float = 1.0
) -> float:
    """Catoni's bound, cut off at 1.

    Arguments:
        error: on the samples: the mean of losses from 0 to 1, such as the share of wrong answers.
        kl: ``KL(Q ‖ P) ≥ 0``, in nats.
        samples: ``N``, their number.
        delta: ``δ``, between 0 and 1: the chance, over the draw of the samples, that the bound does
            not hold.
        temperature: ``β > 0``, which must have been chosen before the data were seen.
    """
    _budget(error, kl, samples, delta)
    beta = number(temperature, "temperature", POSITIVE)
    exponent = -beta * error - (kl + log(1 / delta)) / samples
    return min(1.0, expm1(exponent) / expm1(-beta))


def binary_kl(e: float, q: float) -> float:
    """``KL`` between two coins, in nats.

    Arguments:
        e: chance of heads of the first coin.
        q: chance of heads of the second; where it excludes what ``e`` allows, the result is
            infinite.
    """
    found = 0.0
    for a, b in ((e, q), (1 - e, 1 - q)):
        if a > 0:
            if b <= 0:
                return float("inf")
            found += a * log(a / b)
    return found


def gaussian_kl(distance: Tensor, scales: Tensor, prior_scale: float) -> float:
    """``KL(N(θ, diag scales²) ‖ N(θ₀, prior_scale²))`` in nats: ``½ Σ ((scales² + distance²) /
    prior_scale² - 1 - ln(scales² / prior_scale²))``.

    Arguments:
        distance: ``θ - θ₀ [P]``.
        scales: ``[P]``, standard deviations ``> 0`` of the posterior.
        prior_scale: ``> 0``, standard deviation of the prior, the same for all parameters.
    """
    ratio = (scales.double() / prior_scale).square()
    moved = (distance.double() / prior_scale).square()
    return float((ratio + moved - 1 - ratio.log()).sum() / 2)


def best_prior_scale(distance: Tensor, scales: Tensor) -> tuple[float, float]:
    """The ``prior_scale`` on a grid that makes KL smallest, and what it costs to have chosen it.

    The prior must not depend on the data, so all ``e^{k/10}`` are priors at once, with the weight
    ``1 / ((π²/3 - 1) (|k|+1)²)``, whose negative logarithm is added to KL.

    Arguments:
        distance: ``θ - θ₀ [P]``.
        scales: ``[P]``, standard deviations of the posterior.
    """
    best = float((scales.double().square() + distance.double().square()).mean()) ** 0.5
    k = round(10 * log(best))
    cost = log((torch.pi**2 / 3 - 1) * (abs(k) + 1) ** 2)
    return exp(k / 10), cost


def _budget(error: float, kl: float, samples: int, delta: float) -> float:
    """``(KL + ln(2√N/δ)) / N`` of numbers that are what they must be."""
    number(error, "error", _UNIT)
    number(kl, "kl", NOT_NEGATIVE)
    check_whole(samples, "samples", 1)
    number(delta, "delta", _INSIDE)
    return (kl + log(2 * sqrt(samples) / delta)) / samples
