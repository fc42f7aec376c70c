"""The Laplace posterior: exact for linear regression, and dense formulas for everything else."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from natgrad import (
    EKFAC,
    Diagonal,
    EmpiricalFisher,
    Full,
    Kronecker,
    MonteCarloFisher,
    UnitWise,
)
from natgrad.curvature.losses import OwnLoss
from natgrad.errors import SettingError
from natgrad.measures.laplace import Laplace
from natgrad.measures.predictive import Linearised, MonteCarlo
from natgrad.operators import Problem, fisher
from unit.measures.regression import DTYPE, draw, linear, logistic

N, IN, OUT = 11, 3, 2
NOISE, TAU = 0.6, 1.7
STRUCTURES = {
    "kronecker": Kronecker(),
    "ekfac": EKFAC(),
    "full": Full(),
    "unit-wise": UnitWise(),
    "whole": None,
}
ALL = STRUCTURES | {"diagonal": Diagonal()}


class Regression:
    """Two outputs with a bias: the posterior of each is that of Bayesian linear regression."""

    def __init__(self):
        self.x, self.y = torch.randn(N, IN, dtype=DTYPE), torch.randn(N, OUT, dtype=DTYPE)
        self.new = torch.randn(5, IN, dtype=DTYPE)
        ones = torch.ones(N, 1, dtype=DTYPE)
        self.features = torch.cat([self.x, ones], 1)
        self.precision = self.features.T @ self.features / NOISE**2
        self.precision += TAU * torch.eye(IN + 1, dtype=DTYPE)
        self.covariance = torch.linalg.inv(self.precision).contiguous()
        self.theta = self.covariance @ self.features.T @ self.y / NOISE**2  # [IN + 1, OUT]
        self.model = nn.Linear(IN, OUT, dtype=DTYPE)
        with torch.no_grad():
            self.model.weight.copy_(self.theta[:IN].T)
            self.model.bias.copy_(self.theta[IN])

    def posterior(self, structure):
        return Laplace.fit(
            self.model,
            F.mse_loss,
            [(self.x[:4], self.y[:4]), (self.x[4:], self.y[4:])],
            structure=structure,
            prior_precision=TAU,
            noise=NOISE,
        )

    def flat_covariance(self):
        """In the order of ``weight, bias``."""
        order = [o * (IN + 1) + i for o in range(OUT) for i in range(IN)]
        order += [o * (IN + 1) + IN for o in range(OUT)]
        return torch.kron(torch.eye(OUT, dtype=DTYPE), self.covariance)[order][:, order]

    def evidence(self):
        c = self.features @ self.features.T / TAU + NOISE**2 * torch.eye(N, dtype=DTYPE)
        zero = torch.zeros(N, dtype=DTYPE)
        normal = torch.distributions.MultivariateNormal(zero, c)
        return float(sum(normal.log_prob(self.y[:, o]) for o in range(OUT)))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_linear_regression_has_the_analytic_posterior(structure):
    case = Regression()
    found = case.posterior(STRUCTURES[structure])
    eye = torch.eye(8, dtype=DTYPE)
    expected = case.flat_covariance()
    assert torch.equal(found.mean[: OUT * IN].view(OUT, IN), case.model.weight)
    assert (found.covariance(eye) - expected).abs().max() < 1e-9
    root = found.root(eye)
    assert (root @ root.T - expected).abs().max() < 1e-9
    assert abs(float(found.log_marginal_likelihood()) - case.evidence()) < 1e-9
    predicted = found.predict(case.new)
    features = torch.cat([case.new, torch.ones(5, 1, dtype=DTYPE)], 1)
    variance = ((features @ case.covariance) * features).sum(1, keepdim=True) + NOISE**2
    assert (predicted.mean - features @ case.theta).abs().max() < 1e-9
    assert (predicted.variance - variance).abs().max() < 1e-9
    f, covariance = found.outputs(case.new)
    assert torch.equal(f, predicted.mean)
    assert covariance.shape == (5, OUT, OUT)
    apart = torch.diag_embed(variance.expand(5, OUT) - NOISE**2)
    assert (covariance - apart).abs().max() < 1e-9


def test_samples_have_the_covariance_of_the_posterior():
    case, count = Regression(), 20_000
    found = case.posterior(Kronecker())
    drawn = found.sample(count, seed=3)
    assert {name: t.shape for name, t in drawn[0].items()} == {"weight": (OUT, IN), "bias": (OUT,)}
    rows = torch.stack([found.problem.space.flat(one) for one in drawn])
    expected = case.flat_covariance()
    variance = expected.diagonal()
    assert ((rows.mean(0) - found.mean).abs() < 5 * (variance / count).sqrt()).all()
    spread = (torch.outer(variance, variance) + expected.square()) / count
    assert ((torch.cov(rows.T) - expected).abs() < 5 * spread.sqrt()).all()


def test_samples_are_those_of_the_seed():
    found = Regression().posterior(Full())
    one, same, other = (found.sample(1, seed=seed)[0]["weight"] for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.allclose(found.sample(3)[0]["weight"], one, rtol=1e-12)


def test_monte_carlo_predicts_what_linear_regression_does():
    case, count = Regression(), 4000
    exact = case.posterior(Full()).predict(case.new)
    found = case.posterior(Full()).predict(case.new, by=MonteCarlo(count))
    certain = exact.variance - NOISE**2
    assert ((found.mean - exact.mean).abs() < 5 * (certain / count).sqrt()).all()
    assert ((found.variance - exact.variance).abs() < 5 * certain * (2 / count) ** 0.5).all()


class Classes:
    """A network with three classes, and everything dense."""

    def __init__(self):
        self.model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        self.x, self.y = torch.randn(9, 4, dtype=DTYPE), torch.randint(3, (9,))
        self.new = torch.randn(6, 4, dtype=DTYPE)

    def fit(self, structure, **options):
        data = [(self.x[:2], self.y[:2]), (self.x[2:], self.y[2:])]
        options = {"prior_precision": TAU} | options
        return Laplace.fit(self.model, F.cross_entropy, data, structure=structure, **options)

    def precision(self, structure, **options):
        matrix = fisher(
            self.model, F.cross_entropy, (self.x, self.y), structure=structure, **options
        ).dense()
        return 9 * matrix + TAU * torch.eye(len(matrix), dtype=DTYPE)

    def jacobian(self):
        names = [n for n, _ in self.model.named_parameters()]
        shapes = [p.shape for p in self.model.parameters()]
        theta = torch.cat([p.detach().flatten() for p in self.model.parameters()])

        def outputs(flat):
            parts = flat.split([s.numel() for s in shapes])
            named = {n: p.view(s) for n, p, s in zip(names, parts, shapes, strict=True)}
            return functional_call(self.model, named, (self.new,))

        return torch.autograd.functional.jacobian(outputs, theta), theta


@pytest.mark.parametrize("structure", ALL)
def test_a_network_has_the_posterior_of_the_structure(structure):
    case = Classes()
    found, precision = case.fit(ALL[structure]), case.precision(ALL[structure])
    J, theta = case.jacobian()
    covariance = J @ torch.linalg.inv(precision) @ J.mT
    own = found.outputs(case.new)[1]
    assert (own - covariance).abs().max() < 1e-9
    variance = covariance.diagonal(dim1=1, dim2=2)
    p = (case.model(case.new) / (1 + math.pi / 8 * variance).sqrt()).softmax(1)
    predicted = found.predict(case.new, by=Linearised())
    assert (predicted.mean - p).abs().max() < 1e-9
    assert (predicted.variance - p * (1 - p)).abs().max() < 1e-9
    nll = F.cross_entropy(case.model(case.x), case.y, reduction="sum")
    expected = -nll - TAU / 2 * theta.square().sum() + len(theta) / 2 * math.log(TAU)
    expected -= torch.linalg.slogdet(precision).logabsdet / 2
    evidence = found.log_marginal_likelihood()
    assert abs(float(evidence) - float(expected.detach())) < 1e-9
    assert evidence.standard_error == 0.0
    assert evidence.method.startswith("exact")


def test_drawn_and_empirical_curvature():
    case = Classes()
    for curvature in (MonteCarloFisher(samples=2, seed=3), EmpiricalFisher()):
        found = case.fit(Full(), curvature=curvature)
        matrix = fisher(
            case.model,
            F.cross_entropy,
            found.problem.data.source,
            structure=Full(),
            curvature=curvature,
        ).dense()
        precision = 9 * matrix + TAU * torch.eye(len(matrix), dtype=DTYPE)
        eye = torch.eye(len(matrix), dtype=DTYPE)
        assert (found.covariance(eye) - torch.linalg.inv(precision)).abs().max() < 1e-9


def test_the_empirical_precision_of_a_square_loss_sums_squares_of_likelihood_gradients():
    case = Regression()
    found = Laplace.fit(
        case.model,
        F.mse_loss,
        (case.x, case.y),
        structure=Full(),
        prior_precision=TAU,
        noise=NOISE,
        curvature=EmpiricalFisher(),
    )
    residual = (case.model(case.x) - case.y).detach() / NOISE**2
    weight = torch.einsum("no,ni->noi", residual, case.x).flatten(1)
    rows = torch.cat([weight, residual], 1)
    precision = rows.T @ rows + TAU * torch.eye(8, dtype=DTYPE)
    eye = torch.eye(8, dtype=DTYPE)
    assert (found.covariance(eye) - torch.linalg.inv(precision)).abs().max() < 1e-9


def test_a_probability_is_an_average_over_the_posterior():
    data = draw(n=20, classes=True)
    theta, hessian = logistic(data, TAU / 20)
    found = Laplace.fit(
        linear(theta),
        F.binary_cross_entropy_with_logits,
        data.pair,
        structure=Full(),
        prior_precision=TAU,
    )
    x = draw(n=6, seed=5).x
    covariance = torch.linalg.inv(20 * hessian)
    mean, variance = x @ theta, ((x @ covariance) * x).sum(1)
    grid = torch.linspace(-9, 9, 4001, dtype=DTYPE)
    density = (-grid.square() / 2).exp() / math.sqrt(2 * math.pi)
    points = (mean.unsqueeze(1) + variance.sqrt().unsqueeze(1) * grid).sigmoid()
    average = torch.trapezoid(points * density, grid)
    probit = found.predict(x).mean.squeeze(1)
    assert (probit - (mean / (1 + math.pi / 8 * variance).sqrt()).sigmoid()).abs().max() < 1e-9
    assert (probit - average).abs().max() < 0.01
    drawn = found.predict(x, by=MonteCarlo(4000, seed=1)).mean.squeeze(1)
    assert ((drawn - average).abs() < 5 * (points.var(1) / 4000).sqrt() + 1e-3).all()


def test_the_best_prior_maximises_the_evidence():
    for found in (Classes().fit(Kronecker()), Regression().posterior(Diagonal())):
        best = found.tuned()
        tau = best.prior_precision
        peak = best.log_marginal_likelihood()
        assert peak > found.log_marginal_likelihood()
        for factor in (0.99, 1.01):
            other = Laplace(**{**vars(best), "prior_precision": tau * factor})
            assert other.log_marginal_likelihood() < peak
        square = float(best.mean.square().sum())
        assert abs(best.effective_parameters() - tau * square) < 1e-9
        assert torch.equal(best.mean, found.mean)


def test_a_posterior_of_some_parameters_leaves_the_others_as_they_are():
    case = Classes()
    found = case.fit(Full(), parameters="2.*")
    assert list(found.sample()[0]) == ["2.weight", "2.bias"]
    J, _ = case.jacobian()
    last = J[..., -18:]
    matrix = fisher(case.model, F.cross_entropy, (case.x, case.y)).dense()[-18:, -18:]
    covariance = torch.linalg.inv(9 * matrix + TAU * torch.eye(18, dtype=DTYPE))
    assert (found.outputs(case.new)[1] - last @ covariance @ last.mT).abs().max() < 1e-9


def test_predictions_are_those_of_the_fitted_weights():
    case = Classes()
    found = case.fit(Kronecker())
    before, drawn = found.predict(case.new), found.predict(case.new, by=MonteCarlo(3))
    with torch.no_grad():
        for p in case.model.parameters():
            p.add_(1.0)
    moved = [p.detach().clone() for p in case.model.parameters()]
    assert torch.equal(found.predict(case.new).mean, before.mean)
    assert torch.equal(found.predict(case.new, by=MonteCarlo(3)).mean, drawn.mean)
    assert all(torch.equal(p, q) for p, q in zip(case.model.parameters(), moved, strict=True))


class Trap(nn.Module):
    """Fails when its weight is not the one it was made with."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 2, dtype=DTYPE)
        self.own = self.inner.weight.detach().clone()

    def forward(self, x):
        if not torch.equal(self.inner.weight, self.own):
            raise ArithmeticError("sprung")
        return self.inner(x)


def test_weights_are_back_after_an_exception():
    case, model = Regression(), Trap()
    found = Laplace.fit(model, F.mse_loss, (case.x, case.y))
    with pytest.raises(ArithmeticError, match="sprung"):
        found.predict(case.new, by=MonteCarlo(2))
    assert torch.equal(model.inner.weight, model.own)
    before = model.inner.bias.detach().clone()
    inside = []

    def fail():
        with found.swapped(found.sample()[0]):
            inside.append(model.inner.bias.detach().clone())
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not torch.equal(inside[0], before)
    assert torch.equal(model.inner.bias, before)


def test_single_precision_and_sequences():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))
    x, y = torch.randint(5, (6, 2)), torch.randint(3, (6, 2))
    from natgrad.curvature.losses import CrossEntropy

    found = Laplace.fit(model, CrossEntropy(class_axis=-1), (x, y), structure=Full())
    predicted = found.predict(x)
    assert predicted.mean.dtype == torch.float32
    assert torch.allclose(predicted.mean.sum(-1), torch.ones(6, 2))
    # Every position is a target of its own.
    matrix = fisher(found.problem, structure=Full()).dense()
    eye = torch.eye(len(matrix))
    expected = torch.linalg.inv(12 * matrix + eye)
    assert (found.covariance(eye) - expected).abs().max() < 1e-4


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 2, dtype=DTYPE)

    def forward(self, left, right=0.0):
        return {"logits": self.inner(left + right)}


def test_inputs_are_what_the_model_is_called_with():
    model, case = Keywords(), Regression()
    batch = {"left": case.x, "right": case.x, "labels": case.y}
    found = Laplace.fit(model, F.mse_loss, batch, structure=Full())
    plain = Laplace.fit(model.inner, F.mse_loss, (2 * case.x, case.y), structure=Full())
    expected = plain.predict(2 * case.new)
    for inputs in ({"left": case.new, "right": case.new}, (case.new, case.new)):
        for by in (Linearised(), MonteCarlo(3)):
            assert torch.allclose(
                found.predict(inputs, by).mean, plain.predict(2 * case.new, by).mean
            )
        assert torch.allclose(found.predict(inputs).variance, expected.variance, rtol=1e-9)


def test_it_prints_what_it_is():
    text = repr(Classes().fit(Kronecker()))
    assert "Laplace posterior, prior precision 1.7" in text
    assert "Kronecker" in text


def errors():
    case = Regression()
    fit = partial(Laplace.fit, case.model, F.mse_loss, (case.x, case.y))
    classes = Classes()
    own = Laplace.fit(
        case.model,
        OwnLoss(F.mse_loss, lambda f, y: torch.eye(OUT, dtype=DTYPE).expand(len(f), OUT, OUT)),
        (case.x, case.y),
    )
    silent = nn.Linear(IN, OUT, dtype=DTYPE)
    nn.init.zeros_(silent.weight)
    nn.init.zeros_(silent.bias)
    nothing = Laplace.fit(silent, F.mse_loss, (case.x, case.y))
    flat = Laplace.fit(
        nn.Linear(IN, OUT, bias=False, dtype=DTYPE), F.mse_loss, (0 * case.x, case.y)
    )
    return {
        "prior": (lambda: fit(prior_precision=0.0), "prior_precision is 0.0 but must be finite"),
        "noise": (lambda: fit(noise=-1.0), "noise is -1.0 but must be finite and above 0"),
        "no noise": (lambda: classes.fit(Full(), noise=0.5), "CrossEntropy has no noise of target"),
        "samples": (lambda: own.sample(0), "n is 0 but must be a whole number of at least 1"),
        "draws": (lambda: MonteCarlo(0), "MonteCarlo.samples is 0 but must be a whole number"),
        "by": (lambda: own.predict(case.x, by="mc"), r"by is 'mc' but must be Linearised\(\) or"),
        "own loss": (lambda: own.predict(case.x), "OwnLoss does not say how targets are distrib"),
        "own loss drawn": (
            lambda: own.predict(case.x, by=MonteCarlo(2)),
            "OwnLoss does not say how targets are distributed",
        ),
        "zeros": (lambda: nothing.tuned(), "No prior precision is best, as all parameters are 0"),
        "flat": (lambda: flat.tuned(), "as the loss has no curvature: fit the posterior at"),
        "unknown name": (
            lambda: own.swapped({"w": case.x}).__enter__(),
            "There is no parameter 'w' to give another value to: use names such as 'weight'",
        ),
        "shape": (
            lambda: own.swapped({"bias": case.x}).__enter__(),
            r"The value of 'bias' has the shape \[11, 3\] but the parameter has \[2\]",
        ),
    }


CASES = errors()


@pytest.mark.parametrize("which", CASES)
def test_errors_say_what_to_do(which):
    call, sentence = CASES[which]
    with pytest.raises(SettingError, match=sentence):
        call()


def test_too_many_inputs(monkeypatch):
    found = Regression().posterior(Full())
    monkeypatch.setattr("natgrad.operators.requirements.LARGEST", 100)
    with pytest.raises(SettingError, match=r"Jacobian of these inputs has .* predict fewer of th"):
        found.outputs(torch.ones(3, IN, dtype=DTYPE))


def test_a_problem_is_taken_as_it_is():
    case = Classes()
    problem = Problem(case.model, F.cross_entropy, (case.x, case.y), parameters="0.*")
    assert Laplace.fit(problem).problem is problem
