"""The three Fisher matrices as vectors to backpropagate."""

import pickle

import pytest
import torch
import torch.nn.functional as F

from natgrad.curvature.fisher import EmpiricalFisher, ExactFisher, MonteCarloFisher
from natgrad.curvature.likelihoods import Bernoulli, Categorical, Gaussian
from natgrad.errors import SettingError


def outer(vectors):
    """Σ v vᵀ for each sample: vectors [n, d] to [n, d, d]."""
    flat = torch.stack(list(vectors))
    return torch.einsum("kni,knj->nij", flat, flat)


def test_empirical_asks_for_nothing():
    curvature = EmpiricalFisher()
    output = torch.randn(3, 4)
    assert not curvature.observes
    assert list(curvature.vectors(output)) == []
    assert curvature.passes(output) == 0


def test_the_others_observe_the_output():
    assert MonteCarloFisher().observes
    assert ExactFisher().observes


def test_passes_are_the_vectors():
    output = torch.randn(3, 4)
    generator = torch.Generator()
    for curvature in (MonteCarloFisher(samples=7), ExactFisher(), ExactFisher(Bernoulli())):
        vectors = list(curvature.vectors(output, None, generator))
        assert curvature.passes(output) == len(vectors)
        assert all(v.shape == output.shape for v in vectors)


def test_exact_through_a_network_is_its_fisher():
    """Jᵀ (diag p - p pᵀ) J, from Jacobians on one side and backward passes on the other."""
    net = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 5)
    ).double()
    x = torch.randn(1, 3, dtype=torch.float64)
    parameters = dict(net.named_parameters())

    def logits(values):
        return torch.func.functional_call(net, values, (x,))[0]

    jacobian = torch.func.jacrev(logits)(parameters)
    J = torch.cat([jacobian[name].flatten(1) for name in parameters], dim=1)
    p = logits(parameters).softmax(0).detach()
    expected = J.T @ (p.diag() - torch.outer(p, p)) @ J

    output = net(x)
    rows = [
        torch.cat([g.flatten() for g in grads])
        for v in ExactFisher().vectors(output)
        for grads in [torch.autograd.grad(output, net.parameters(), v, retain_graph=True)]
    ]
    fisher = sum(torch.outer(row, row) for row in rows)
    torch.testing.assert_close(fisher, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(0.5), Bernoulli()])
def test_monte_carlo_estimates_the_exact(likelihood):
    output = torch.randn(4, 5, dtype=torch.float64)
    exact = outer(ExactFisher(likelihood).vectors(output))
    error = []
    for samples in (400, 6400):
        curvature = MonteCarloFisher(samples, likelihood=likelihood)
        estimate = outer(curvature.vectors(output, None, curvature.generator("cpu")))
        error.append((estimate - exact).norm() / exact.norm())
    assert error[1] < 0.1
    assert error[1] < 0.6 * error[0]


def test_one_sample_is_not_scaled():
    output = torch.randn(4, 5)
    curvature = MonteCarloFisher(seed=3)
    (v,) = curvature.vectors(output, None, curvature.generator("cpu"))
    assert torch.equal(v, Categorical().sample(output, curvature.generator("cpu")))


def test_ignored_targets_reach_the_likelihood():
    output = torch.randn(2, 5)
    targets = torch.tensor([1, -100])
    for curvature in (MonteCarloFisher(samples=3), ExactFisher()):
        for v in curvature.vectors(output, targets, torch.Generator()):
            assert (v[1] == 0).all()
            assert (v[0] != 0).any()


def test_generators():
    curvature = MonteCarloFisher(seed=5)
    before = torch.get_rng_state()
    draws = {
        (seed, stream): torch.rand(
            2, generator=MonteCarloFisher(seed=seed).generator("cpu", stream)
        ).sum()
        for seed in (4, 5)
        for stream in (0, 1, 2**20)
    }
    assert len({draw.item() for draw in draws.values()}) == len(draws)
    again = torch.rand(2, generator=curvature.generator("cpu", stream=1)).sum()
    assert torch.equal(again, draws[5, 1])
    assert torch.equal(before, torch.get_rng_state())


def test_empirical_differs_from_the_exact():
    """What EmpiricalFisher averages, the training gradient, is not a draw from the model."""
    output = torch.randn(64, 5, dtype=torch.float64, requires_grad=True)
    loss = F.cross_entropy(output, torch.zeros(64).long(), reduction="sum")
    (g,) = torch.autograd.grad(loss, output)
    exact = outer(ExactFisher().vectors(output)).mean(0)
    assert (outer([g]).mean(0) - exact).norm() / exact.norm() > 0.2


@pytest.mark.parametrize(
    "curvature",
    [EmpiricalFisher(), MonteCarloFisher(2, 3, Gaussian(2.0)), ExactFisher(Bernoulli())],
)
def test_policies_are_values(curvature):
    copy = pickle.loads(pickle.dumps(curvature))
    assert copy == curvature
    assert hash(copy) == hash(curvature)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: MonteCarloFisher(samples=0),
            "MonteCarloFisher.samples is 0 but must be a whole number of at least 1: pass such an "
            "int.",
        ),
        (
            lambda: MonteCarloFisher(samples=1.5),
            "MonteCarloFisher.samples is 1.5 but must be a whole number of at least 1: pass such "
            "an int.",
        ),
        (
            lambda: MonteCarloFisher(seed=-1),
            "MonteCarloFisher.seed is -1 but must be a whole number of at least 0: pass such an "
            "int.",
        ),
        (
            lambda: MonteCarloFisher(likelihood="categorical"),
            "MonteCarloFisher.likelihood is 'categorical' but must be a likelihood: pass "
            "Categorical(), Gaussian() or Bernoulli().",
        ),
        (
            lambda: ExactFisher(likelihood=None),
            "ExactFisher.likelihood is None but must be a likelihood: pass Categorical(), "
            "Gaussian() or Bernoulli().",
        ),
        (
            lambda: MonteCarloFisher().vectors(torch.zeros(2, 3)),
            "MonteCarloFisher got None as generator but draws from one that is kept between "
            "steps: make it once with .generator(device) and pass it each time.",
        ),
    ],
)
def test_errors(make, message):
    with pytest.raises(SettingError) as error:
        make()
    assert str(error.value) == message
