"""The loss of noisy weights against expectations in closed form, those of linear regression."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from natgrad.measures import Isotropic, MagnitudeAware, mistakes, tolerated_sigma
from natgrad.measures.noisy_loss import WeightDraws
from natgrad.operators import Problem
from unit.measures.brute_force import DTYPE, batches, classified, network, refuses


def regression(size=3):
    """``E L(θ + σ_i z_i) = L + Σ σ_i² mean x_i²``."""
    x, y = torch.randn(20, size, dtype=DTYPE), torch.randn(20, 1, dtype=DTYPE)
    model = nn.Linear(size, 1, bias=False, dtype=DTYPE)
    return Problem(model, F.mse_loss, batches(x, y, 5, 15)), x


class TestExpectations:
    @pytest.mark.parametrize("sigma", [0.01, 0.5])
    def test_isotropic(self, sigma):
        problem, x = regression()
        found = WeightDraws(problem, Isotropic(), None, 2000, 0, None).at(sigma).loss
        truth = problem.value() + sigma**2 * float(x.square().sum(1).mean())
        assert abs(float(found) - truth) < 4 * found.standard_error
        assert found.method == "2000 draws of noisy weights"

    def test_magnitude_aware(self):
        problem, x = regression()
        prior = {"weight": torch.randn(1, 3, dtype=DTYPE)}
        weight = problem.parameters["weight"].detach()
        variances = 0.4**2 * (weight - prior["weight"]).square() + 0.1**2
        cloud = WeightDraws(problem, MagnitudeAware(floor=0.1), prior, 2000, 0, None)
        torch.testing.assert_close(cloud.scales(0.4), variances.sqrt().flatten())
        found = cloud.at(0.4).loss
        truth = problem.value() + float((variances * x.square().mean(0)).sum())
        assert abs(float(found) - truth) < 4 * found.standard_error

    def test_standard_errors(self):
        problem, _ = regression()
        clouds = [WeightDraws(problem, Isotropic(), None, 20, seed, None) for seed in range(60)]
        found = [cloud.at(0.5).loss for cloud in clouds]
        spread = float(torch.tensor([float(one) for one in found]).std())
        error = math.sqrt(sum(one.standard_error**2 for one in found) / 60)
        assert error == pytest.approx(spread, rel=0.3)

    def test_the_same_draws_at_every_sigma(self):
        problem, _ = regression()
        cloud = WeightDraws(problem, Isotropic(), None, 4, 0, None)
        assert cloud.at(0.1).loss == cloud.at(0.1).loss
        other = WeightDraws(problem, Isotropic(), None, 4, 1, None)
        assert cloud.at(0.1).loss != other.at(0.1).loss

    def test_errors_beside_the_loss(self):
        x, y = classified(20, 4, 3)
        model = network(4, 3)
        problem = Problem(model, F.cross_entropy, batches(x, y, 5, 15))
        cloud = WeightDraws(problem, Isotropic(), None, 8, 0, mistakes(F.cross_entropy))
        loss, error = cloud.calm()
        assert loss == pytest.approx(problem.value())
        with torch.no_grad():
            assert error == pytest.approx(float((model(x).argmax(1) != y).double().mean()))
        assert cloud.at(10.0).watched is not None
        assert float(cloud.at(100.0).error) > 0.3

    def test_parameters_come_back(self):
        problem, _ = regression()
        before = problem.parameters["weight"].detach().clone()
        WeightDraws(problem, Isotropic(), None, 3, 0, None).at(1.0)
        assert torch.equal(problem.parameters["weight"], before)


class TestSearch:
    @pytest.mark.parametrize("tolerance", [1e-6, 0.1, 1e4])
    def test_is_the_root_in_closed_form(self, tolerance):
        problem, x = regression()
        found = tolerated_sigma(problem, tolerance=tolerance, samples=150)
        truth = math.sqrt(tolerance / float(x.square().sum(1).mean()))
        # At a minimum the draws leave no linear term; elsewhere it is zero on average.
        slope = 4 * found.noisy.standard_error / (2 * tolerance)
        assert found.sigma == pytest.approx(truth, rel=0.03 + slope)
        assert float(found.noisy) - found.calm <= tolerance
        assert found.flatness == pytest.approx(found.sigma**-2)
        assert float(found) == found.sigma

    def test_is_the_largest_to_two_percent(self):
        problem, _ = regression()
        found = tolerated_sigma(problem, tolerance=0.1, samples=5, seed=3)
        cloud = WeightDraws(problem, Isotropic(), None, 5, 3, None)
        assert float(cloud.at(found.sigma).loss) == float(found.noisy)
        assert float(cloud.at(found.sigma * 1.03).loss) - found.calm > 0.1

    def test_of_errors(self):
        x = torch.randn(40, 4, dtype=DTYPE)
        model = network(4, 3)
        with torch.no_grad():
            y = model(x).argmax(1)
        y[:3] = (y[:3] + 1) % 3
        wrong = mistakes(F.cross_entropy)
        found = tolerated_sigma(model, F.cross_entropy, (x, y), of=wrong, tolerance=0.05)
        assert found.calm == 3 / 40
        assert 0 < found.sigma < 10
        assert float(found.noisy) - found.calm <= 0.05

    def test_of_some_parameters(self):
        x, y = classified(20, 4, 3)
        model = network(4, 5, 3)
        some = tolerated_sigma(model, F.cross_entropy, (x, y), parameters="2.bias")
        whole = tolerated_sigma(model, F.cross_entropy, (x, y))
        assert some.sigma > whole.sigma

    def test_prints_a_line(self):
        problem, _ = regression()
        found = tolerated_sigma(problem, tolerance=0.5)
        assert str(found) == (
            f"noise of σ = {found.sigma:.4g} is tolerated: {found.calm:.6g} becomes {found.noisy} "
            "(at most 0.5 more)"
        )


class TestRefusals:
    def test_no_noise_is_too_much(self):
        x, y = classified(20, 4, 3)
        wrong = mistakes(F.cross_entropy)
        model = network(4, 3)
        with pytest.raises(ValueError, match=r"^Noise of σ = 1.048\S+ makes .* give a smaller tol"):
            tolerated_sigma(model, F.cross_entropy, (x, y), of=wrong, tolerance=2.0, samples=2)

    def test_any_noise_is_too_much(self):
        problem, _ = regression()
        posterior = MagnitudeAware(floor=10.0)
        with pytest.raises(
            ValueError, match=r"^Noise of σ = 9e-13 makes .* or a smaller floor to "
        ):
            tolerated_sigma(problem, posterior=posterior, tolerance=1e-3, samples=2)

    def test_settings(self):
        problem, _ = regression()
        with refuses("tolerance is 0 but must be finite and above 0: pass such a number."):
            tolerated_sigma(problem, tolerance=0)
        with refuses("samples is 1 but must be a whole number of at least 2: pass such an int."):
            tolerated_sigma(problem, samples=1)
        with refuses("seed is -1 but must be a whole number of at least 0: pass such an int."):
            tolerated_sigma(problem, seed=-1)
        with refuses("Isotropic.sigma is 0 but must be finite and above 0: pass such a number."):
            Isotropic(0)
        with refuses(
            "MagnitudeAware.floor is 0 but must be finite and above 0: pass such a number."
        ):
            MagnitudeAware(floor=0)
        with refuses(
            "posterior is 0.1 but must say how noise is spread over weights: give Isotropic() or "
            "MagnitudeAware()."
        ):
            tolerated_sigma(problem, posterior=0.1)

    def test_errors_that_are_no_numbers_of_samples(self):
        problem, _ = regression()
        for wrong, given in ((lambda o, t: o.mean(), []), (lambda o, t: 0.5, "float")):
            with refuses(
                f"The error function returned {given} for 5 samples but must return one number for "
                "each, a tensor of shape [5]: leave out the mean."
            ):
                tolerated_sigma(problem, of=wrong)

    def test_priors(self):
        problem, _ = regression()
        with refuses(
            "The prior has no 'weight', which is a parameter of the model: give a model of the "
            "same kind, its state_dict(), or None for zeros."
        ):
            tolerated_sigma(problem, prior={"bias": torch.zeros(1)})
        with refuses(
            "The prior is an object of type float but must be a model, a dict of tensors by name, "
            "or None for zeros: give one of them."
        ):
            tolerated_sigma(problem, prior=1.0)
