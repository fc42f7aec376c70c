"""PAC-Bayes of networks from its parts, by hand."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal, kl_divergence

from natgrad.measures import (
    Isotropic,
    MagnitudeAware,
    catoni,
    mcallester,
    mistakes,
    pac_bayes,
    seeger,
    tolerated_sigma,
)
from natgrad.operators import Problem
from unit.measures.brute_force import DTYPE, batches, minimised, network, refuses


def separable(n=400):
    x = torch.randn(n, 3, dtype=DTYPE)
    y = (x[:, 0] + 0.5 * x[:, 1] > 0).long()
    initial = network(3, 4, 2)
    model = minimised(copy.deepcopy(initial), F.cross_entropy, x, y, steps=8)
    return model, initial, x, y


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_by_hand():
    """Fixed noise and a fixed prior: nothing is searched for."""
    model, initial, x, y = separable()
    found = pac_bayes(
        model,
        F.cross_entropy,
        batches(x, y, 150, 250),
        posterior=Isotropic(0.05),
        prior=initial,
        prior_sigma=2.0,
        samples=5,
        delta=0.1,
        temperature=2.0,
        seed=7,
    )
    theta, start = flat(model), flat(initial)
    posterior = Normal(theta, torch.full_like(theta, 0.05))
    prior = Normal(start, torch.full_like(theta, 2.0))
    kl = float(kl_divergence(posterior, prior).sum())
    assert found.kl == pytest.approx(kl, rel=1e-10)
    generator = torch.Generator().manual_seed(7)
    errors, losses = [], []
    for _ in range(5):
        noisy = copy.deepcopy(model)
        z = torch.randn(len(theta), generator=generator, dtype=DTYPE)
        nn.utils.vector_to_parameters(theta + 0.05 * z, noisy.parameters())
        with torch.no_grad():
            f = noisy(x)
        errors.append(float((f.argmax(1) != y).double().mean()))
        losses.append(float(F.cross_entropy(f, y)))
    mean = sum(errors) / 5
    assert float(found.noisy_error) == pytest.approx(mean, rel=1e-10)
    assert float(found.noisy_loss) == pytest.approx(sum(losses) / 5, rel=1e-10)
    spread = float(torch.tensor(errors).std()) / math.sqrt(5)
    assert found.noisy_error.standard_error == pytest.approx(spread, rel=1e-5)
    with torch.no_grad():
        assert found.loss == pytest.approx(float(F.cross_entropy(model(x), y)))
        assert found.error == pytest.approx(float((model(x).argmax(1) != y).double().mean()))
    budget = kl + math.log(2 * math.sqrt(400) / 0.1)
    assert found.mcallester == pytest.approx(mean + math.sqrt(budget / 800), rel=1e-9)
    q = found.seeger
    divergence = mean * math.log(mean / q) + (1 - mean) * math.log((1 - mean) / (1 - q))
    assert divergence == pytest.approx(budget / 400, rel=1e-6)
    exponent = 2 * mean + (kl + math.log(10)) / 400
    assert found.catoni == pytest.approx((1 - math.exp(-exponent)) / (1 - math.exp(-2)), rel=1e-9)
    assert (found.sigma, found.prior_sigma, found.samples) == (0.05, 2.0, 400)
    assert found.flatness == pytest.approx(400)


@pytest.mark.parametrize("posterior", [Isotropic(), MagnitudeAware(floor=1e-2)])
def test_noise_is_what_the_error_bears(posterior):
    model, initial, x, y = separable()
    problem = Problem(model, F.cross_entropy, (x, y))
    found = pac_bayes(problem, posterior=posterior, prior=initial, tolerance=0.05)
    searched = tolerated_sigma(
        problem,
        posterior=posterior,
        prior=initial,
        tolerance=0.05,
        of=mistakes(F.cross_entropy),
    )
    assert found.sigma == searched.sigma
    assert float(found.noisy_error) == float(searched.noisy)
    assert float(found.noisy_error) <= found.error + 0.05


def test_the_best_prior_is_paid_for():
    model, initial, x, y = separable()
    problem = Problem(model, F.cross_entropy, (x, y))
    chosen = pac_bayes(problem, posterior=Isotropic(0.05), prior=initial, samples=2)
    k = round(10 * math.log(chosen.prior_sigma))
    fixed = pac_bayes(
        problem,
        posterior=Isotropic(0.05),
        prior=initial,
        samples=2,
        prior_sigma=chosen.prior_sigma,
    )
    cost = math.log((math.pi**2 / 3 - 1) * (abs(k) + 1) ** 2)
    assert chosen.kl == pytest.approx(fixed.kl + cost, rel=1e-10)
    equal = pac_bayes(
        problem, posterior=Isotropic(0.05), prior=initial, samples=2, prior_sigma=0.05
    )
    assert chosen.kl < equal.kl


def test_a_magnitude_aware_posterior():
    model, initial, x, y = separable()
    theta, start = flat(model), flat(initial)
    scales = (0.2**2 * (theta - start).square() + 0.01**2).sqrt()
    prior = Normal(start, torch.full_like(theta, 0.5))
    found = pac_bayes(
        model,
        F.cross_entropy,
        (x, y),
        posterior=MagnitudeAware(0.2, 0.01),
        prior=initial.state_dict(),
        prior_sigma=0.5,
        samples=2,
    )
    truth = float(kl_divergence(Normal(theta, scales), prior).sum())
    assert found.kl == pytest.approx(truth, rel=1e-10)


def test_without_a_prior_the_distance_is_from_zero():
    model, _, x, y = separable()
    found = pac_bayes(
        model, F.cross_entropy, (x, y), posterior=Isotropic(0.1), prior_sigma=0.1, samples=2
    )
    assert found.kl == pytest.approx(float(flat(model).square().sum()) / (2 * 0.1**2), rel=1e-10)


def test_a_bound_that_says_something():
    """Four parameters and many samples: the bound is below a guess, and above the error."""
    x = torch.randn(5000, 2, dtype=DTYPE)
    y = (x[:, 0] > 0).long()
    model = minimised(network(2, 2, bias=False), F.cross_entropy, x, y, steps=20)
    found = pac_bayes(model, F.cross_entropy, (x, y), tolerance=0.02, samples=4)
    assert float(found.noisy_error) < found.seeger < found.mcallester < 0.2
    for bound in (mcallester, seeger, catoni):
        assert getattr(found, bound.__name__) == bound(float(found.noisy_error), found.kl, 5000)


def test_an_error_of_ones_own():
    x = torch.randn(50, 2, dtype=DTYPE)
    y = x.sum(1, keepdim=True)
    model = minimised(nn.Linear(2, 1, dtype=DTYPE), F.mse_loss, x, y)

    def clipped(output, target):
        return (output - target).square().clamp(max=1.0).mean(1)

    found = pac_bayes(model, F.mse_loss, (x, y), error=clipped, tolerance=0.1)
    assert found.error == pytest.approx(0, abs=1e-10)
    assert 0.05 < float(found.noisy_error) <= 0.1 + 1e-10


def test_prints_a_table():
    model, _, x, y = separable()
    found = pac_bayes(model, F.cross_entropy, (x, y), posterior=Isotropic(0.05), samples=2)
    assert found.table().column("value")[2] == f"{found.kl:.4g}"
    assert found.table().title == "PAC-Bayes"
    assert "McAllester's bound" in str(found)
    assert "400 samples, with probability 0.95" in str(found)


class TestRefusals:
    def test_losses_without_classes(self):
        x = torch.randn(5, 2, dtype=DTYPE)
        with refuses(
            "SquareLoss has no classes, so there are no margins and no mistakes: use a "
            "cross-entropy, or give an error of your own where one is asked for."
        ):
            pac_bayes(nn.Linear(2, 2, dtype=DTYPE), F.mse_loss, (x, x))

    def test_errors_above_one(self):
        x = torch.randn(5, 2, dtype=DTYPE)
        with refuses(
            "The mean error is 3, but PAC-Bayes bounds are of errors from 0 to 1: clip or rescale "
            "what error(output, target) returns."
        ):
            pac_bayes(
                nn.Linear(2, 2, dtype=DTYPE),
                F.mse_loss,
                (x, x),
                posterior=Isotropic(0.1),
                error=lambda output, target: torch.full((5,), 3.0),
            )

    def test_prior_sigma(self):
        model, _, x, y = separable(20)
        with refuses("prior_sigma is -1 but must be finite and above 0: pass such a number."):
            pac_bayes(
                model, F.cross_entropy, (x, y), posterior=Isotropic(0.1), prior_sigma=-1, samples=2
            )
