"""Noise scales against covariances written out, and against gradients of real batches."""

import pytest
import torch
import torch.nn.functional as F

from natgrad.linalg.results import Number
from natgrad.measures import NoiseScale, Signs, Subset, noise_scale
from natgrad.operators import Problem, ggn, hessian
from natgrad.structures import Diagonal
from unit.measures.brute_force import Brute, batches, classified, network, refuses


def case(n=20):
    x, y = classified(n, 4, 3)
    model = network(4, 3, 3)
    return Brute(model, F.cross_entropy, x, y), batches(x, y, 3, 10, n - 13)


@pytest.mark.parametrize("matrix", [hessian, ggn])
@pytest.mark.parametrize("n", [20, 60])
def test_both_against_brute_force(matrix, n):
    brute, data = case(n)
    g, covariance = brute.gradient(), brute.covariance()
    dense = brute.hessian() if matrix is hessian else brute.ggn()
    found = noise_scale(brute.model, F.cross_entropy, data, matrix=matrix)
    assert found.simple == pytest.approx(float(covariance.trace() / (g @ g)), rel=1e-9)
    truth = float((dense @ covariance).trace() / (g @ dense @ g))
    if truth < 0:
        truth = float("inf")
    assert found.curved == pytest.approx(truth, rel=1e-9)
    assert found.critical == found.curved
    assert found.samples == n


def test_a_structured_matrix_and_a_made_one():
    brute, data = case()
    problem = Problem(brute.model, F.cross_entropy, data)
    g, covariance = brute.gradient(), brute.covariance()
    dense = brute.ggn().diagonal().diag()
    truth = float((dense @ covariance).trace() / (g @ dense @ g))
    found = noise_scale(problem, matrix=lambda p: ggn(p, structure=Diagonal()))
    assert found.curved == pytest.approx(truth, rel=1e-9)
    made = noise_scale(problem, matrix=ggn(problem, structure=Diagonal()))
    assert made.curved == pytest.approx(truth, rel=1e-9)


def test_gradients_of_batches_vary_by_the_variance_over_their_size():
    brute, data = case()
    found = noise_scale(brute.model, F.cross_entropy, data, matrix=ggn)
    size, draws = 5, 3000
    chosen = torch.randint(20, (draws, size))
    gradients = brute.rows()[chosen].mean(1)
    away = gradients - brute.gradient()
    plain = away.square().sum(1)
    curved = (away @ brute.ggn() * away).sum(1)
    for each, truth in ((plain, found.variance), (curved, float(found.curved_variance))):
        error = float(each.std()) / draws**0.5
        assert abs(float(each.mean()) - truth / size) < 4 * error
    # A quadratic loss falls by progress() of what it falls with all data, at the best step.
    g, G = brute.gradient(), brute.ggn()
    best_all = (g @ g) ** 2 / (2 * g @ G @ g)
    curvature = (gradients @ G * gradients).sum(1).mean()
    best_batch = (gradients @ g).mean() ** 2 / (2 * curvature)
    assert float(best_batch / best_all) == pytest.approx(found.progress(size), rel=0.05)


def test_unbiased_for_what_the_samples_were_drawn_from():
    """Averaged over many small samples of one population."""
    brute, _ = case(40)
    rows, G = brute.rows(), brute.ggn()
    mean = rows.mean(0)
    signal = float(mean @ mean), float(mean @ G @ mean)
    noise = float(brute.covariance().trace()), float((G @ brute.covariance()).trace())
    draws, size = 4000, 6
    chosen = rows[torch.randint(40, (draws, size))]
    g = chosen.mean(1)
    away = chosen - g.unsqueeze(1)
    plain = away.square().sum(2).mean(1)
    curved = ((away @ G) * away).sum(2).mean(1)
    each = []
    for one in zip(plain, curved, g.square().sum(1), ((g @ G) * g).sum(1), strict=True):
        variance, bent, square, along = (float(value) for value in one)
        found = NoiseScale(size, variance, square, Number(bent), along).unbiased()
        each.append(
            [found.variance, found.gradient, float(found.curved_variance), found.curved_gradient]
        )
    found, truth = torch.tensor(each), torch.tensor([noise[0], signal[0], noise[1], signal[1]])
    errors = found.std(0) / draws**0.5
    assert bool(((found.mean(0) - truth).abs() < 4 * errors).all())
    # Without the correction all four are far off.
    biased = torch.stack([plain, g.square().sum(1), curved, ((g @ G) * g).sum(1)], 1).mean(0)
    assert bool(((biased - truth).abs() > 10 * errors).all())


@pytest.mark.parametrize("by", [Subset(15), Signs(400)])
def test_estimates(by):
    brute, data = case(40)
    exact = noise_scale(brute.model, F.cross_entropy, data, matrix=ggn)
    found = noise_scale(brute.model, F.cross_entropy, data, matrix=ggn, by=by)
    assert found.variance == exact.variance
    error = found.curved.standard_error
    assert 0 < error < 0.5 * float(exact.curved)
    assert abs(float(found.curved) - float(exact.curved)) < 4 * error


def test_without_a_matrix():
    brute, data = case()
    found = noise_scale(brute.model, F.cross_entropy, data, matrix=None)
    assert found.critical == found.simple
    assert found.unbiased().variance == pytest.approx(found.variance * 20 / 19)
    with refuses(
        "The noise scale was measured without a matrix (matrix=None), so there is no curved one: "
        "give matrix=natgrad.hessian or natgrad.ggn."
    ):
        _ = found.curved


def test_no_signal_is_infinite_noise():
    found = NoiseScale(10, 1.0, 0.0, Number(1.0), -1.0)
    assert found.simple == found.curved == float("inf")
    assert found.progress(100) == 0


def test_prints_a_line():
    brute, data = case()
    found = noise_scale(brute.model, F.cross_entropy, data, matrix=ggn)
    assert str(found).startswith(f"noise scale of 20 samples: B_noise {found.curved} (tr HΣ ")
    assert "\n" not in str(found)
    plain = noise_scale(brute.model, F.cross_entropy, data, matrix=None)
    assert str(plain).startswith(f"noise scale of 20 samples: B_simple {found.simple:.4g} ")


def test_refusals():
    brute, data = case()
    problem = Problem(brute.model, F.cross_entropy, data)
    with refuses(
        "matrix is 'hessian' but must be an operator or a function that makes one of a problem: "
        "give natgrad.hessian, natgrad.ggn or natgrad.fisher."
    ):
        noise_scale(problem, matrix="hessian")
    other = ggn(brute.model, F.cross_entropy, data, parameters="*bias")
    with refuses(
        "matrix is over 6 parameters but the measure is over 27: make both of the same ones."
    ):
        noise_scale(problem, matrix=other)
    with refuses("batch is 0 but must be finite and above 0: pass such a number."):
        noise_scale(problem, matrix=None).progress(0)
    with refuses(
        "The noise scale was measured on 1 sample, which has no variance to correct: give at "
        "least 2 samples."
    ):
        NoiseScale(1, 0.0, 1.0, None, None).unbiased()


@pytest.mark.parametrize("n", [5, 200])
def test_a_large_mean_gradient_costs_no_digits(n):
    x = 1 + 1e-3 * torch.randn(n, 3)
    y = 100 + 1e-1 * torch.randn(n, 2)
    model = network(3, 2).float()
    found = noise_scale(model, F.mse_loss, (x, y), matrix=ggn)
    model.double()
    exact = noise_scale(model, F.mse_loss, (x.double(), y.double()), matrix=ggn)
    assert found.variance == pytest.approx(exact.variance, rel=1e-3)
    assert found.curved_variance == pytest.approx(float(exact.curved_variance), rel=1e-3)
