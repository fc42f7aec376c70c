"""PAC-Bayes bounds by hand, and divergences of normal distributions against torch's."""

import math

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from natgrad.measures import catoni, mcallester, seeger
from natgrad.measures.bounds import best_prior_scale, binary_kl, gaussian_kl
from unit.measures.brute_force import DTYPE, refuses


class TestByHand:
    """With an error of 0.1 on 1000 samples, KL = 20 and delta = 0.05."""

    def test_mcallester(self):
        # ln(2 √1000 / 0.05) = ln 1264.911 = 7.142757
        assert mcallester(0.1, 20, 1000) == pytest.approx(
            0.1 + math.sqrt(27.142757 / 2000), rel=1e-7
        )
        assert mcallester(0.1, 20, 1000) == pytest.approx(0.2164962, rel=1e-6)

    def test_catoni(self):
        # (1 - exp(-0.1 - (20 + ln 20) / 1000)) / (1 - 1/e)
        exponent = 0.1 + (20 + 2.995732274) / 1000
        truth = (1 - math.exp(-exponent)) / (1 - 1 / math.e)
        assert catoni(0.1, 20, 1000) == pytest.approx(truth, rel=1e-9)
        assert catoni(0.1, 20, 1000) == pytest.approx(0.18308622, rel=1e-7)
        exponent = 0.3 + (20 + 2.995732274) / 1000
        truth = (1 - math.exp(-exponent)) / (1 - math.exp(-3))
        assert catoni(0.1, 20, 1000, temperature=3.0) == pytest.approx(truth, rel=1e-9)

    def test_seeger(self):
        q = seeger(0.1, 20, 1000)
        divergence = 0.1 * math.log(0.1 / q) + 0.9 * math.log(0.9 / (1 - q))
        assert divergence == pytest.approx(0.027142757, rel=1e-6)
        assert q > 0.1

    def test_seeger_without_errors(self):
        # ln(1 / (1 - q)) = budget
        assert seeger(0.0, 20, 1000) == pytest.approx(1 - math.exp(-0.027142757), rel=1e-6)


@pytest.mark.parametrize("error", [0.0, 0.01, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("kl", [0.0, 5.0, 1e6])
def test_bounds_lie_between_the_error_and_one(error, kl):
    for bound in (mcallester, seeger, catoni):
        assert error - 1e-9 <= bound(error, kl, 500) <= 1
    assert seeger(error, kl, 500) <= mcallester(error, kl, 500) + 1e-9  # Pinsker


def test_bounds_hold():
    """A coin that errs with chance 0.2, which no data have chosen: KL is 0."""
    errors = torch.distributions.Binomial(100, torch.tensor(0.2)).sample((2000,)) / 100
    for bound in (mcallester, seeger, catoni):
        missed = sum(bound(float(e), 0.0, 100, 0.2) < 0.2 for e in errors) / 2000
        assert missed <= 0.2


def test_binary_kl_at_the_ends():
    assert binary_kl(0.0, 0.0) == binary_kl(1.0, 1.0) == 0
    assert binary_kl(0.5, 0.0) == binary_kl(0.5, 1.0) == math.inf


class TestGaussians:
    def test_kl_is_torchs(self):
        distance = torch.randn(50, dtype=DTYPE)
        scales = torch.rand(50, dtype=DTYPE) + 0.1
        prior = Normal(torch.zeros(50, dtype=DTYPE), torch.full((50,), 0.7, dtype=DTYPE))
        truth = float(kl_divergence(Normal(distance, scales), prior).sum())
        assert gaussian_kl(distance, scales, 0.7) == pytest.approx(truth, rel=1e-10)

    def test_of_equal_variances(self):
        distance = torch.randn(50, dtype=DTYPE)
        truth = float(distance.square().sum()) / (2 * 0.3**2)
        scales = torch.full((50,), 0.3, dtype=DTYPE)
        assert gaussian_kl(distance, scales, 0.3) == pytest.approx(truth, rel=1e-10)

    @pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
    def test_the_best_prior_is_on_the_grid_and_best(self, size):
        distance = size * torch.randn(50, dtype=DTYPE)
        scales = size * (torch.rand(50, dtype=DTYPE) + 0.1)
        best, cost = best_prior_scale(distance, scales)
        k = round(10 * math.log(best))
        assert best == pytest.approx(math.exp(k / 10), rel=1e-12)
        assert cost == pytest.approx(-math.log(weight(k)), rel=1e-12)
        for other in (math.exp((k - 1) / 10), math.exp((k + 1) / 10)):
            assert gaussian_kl(distance, scales, other) > gaussian_kl(distance, scales, best)

    def test_priors_share_one_probability(self):
        total = sum(weight(k) for k in range(-200_000, 200_001))
        assert total == pytest.approx(1, abs=1e-5)


def weight(k):
    return 1 / ((math.pi**2 / 3 - 1) * (abs(k) + 1) ** 2)


@pytest.mark.parametrize("bound", [mcallester, seeger, catoni])
def test_refusals(bound):
    with refuses("error is 1.5 but must be in [0, 1]: pass such a number."):
        bound(1.5, 1.0, 10)
    with refuses("kl is -1 but must be finite and at least 0: pass such a number."):
        bound(0.1, -1, 10)
    with refuses("samples is 0 but must be a whole number of at least 1: pass such an int."):
        bound(0.1, 1.0, 0)
    with refuses("delta is 1 but must be in (0, 1): pass such a number."):
        bound(0.1, 1.0, 10, 1)
    with refuses("temperature is 0 but must be finite and above 0: pass such a number."):
        catoni(0.1, 1.0, 10, temperature=0)
