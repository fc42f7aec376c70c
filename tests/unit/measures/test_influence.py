"""Influence against leaving samples out: exactly for ridge, after retraining for logistic."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from natgrad import EKFAC, Full, Kronecker
from natgrad.errors import SettingError
from natgrad.measures.influence import influence, pairwise_influence, self_influence
from natgrad.operators import Problem, ggn, hessian
from unit.measures.regression import DTYPE, draw, linear, logistic, mean_loss, ridge

DECAY = 0.3


class Trained:
    """At the minimum of ``mean loss + decay/2 |theta|²``."""

    def __init__(self, classes, n=14):
        self.classes, self.n = classes, n
        self.fit = logistic if classes else ridge
        self.train, self.test = draw(n, classes=classes), draw(5, classes=classes, seed=1)
        self.theta, self.hessian = self.fit(self.train, DECAY)
        self.model = linear(self.theta)
        self.loss = F.binary_cross_entropy_with_logits if classes else F.mse_loss

    def matrix(self, make=hessian, **options):
        x, y = self.train.pair
        return make(self.model, self.loss, [(x[:3], y[:3]), (x[3:], y[3:])], **options)

    def gradients(self, data):
        """``[n, d]`` of single losses."""
        f = data.x @ self.theta
        slope = f.sigmoid() - data.y if self.classes else 2 * (f - data.y)
        return slope.unsqueeze(1) * data.x

    def left_out(self, n):
        """Trained without sample n, the others weighted as before."""
        return self.fit(self.train.without(n), DECAY, scale=self.n)[0]


@pytest.fixture(params=[False, True], ids=["ridge", "logistic"])
def trained(request):
    return Trained(request.param)


@pytest.mark.parametrize("kind", ["hessian", "ggn", "full", "kronecker", "ekfac"])
def test_scores_are_those_of_the_dense_inverse(trained, kind):
    structures = {"full": Full(), "kronecker": Kronecker(), "ekfac": EKFAC()}
    if kind == "hessian":
        matrix = trained.matrix()
    else:
        matrix = trained.matrix(ggn, structure=structures.get(kind))
    curvature = trained.hessian
    if kind in structures:
        curvature = matrix.dense() + DECAY * torch.eye(4, dtype=DTYPE)
    each, tests = trained.gradients(trained.train), trained.gradients(trained.test)
    expected = -tests @ torch.linalg.solve(curvature, each.T)
    pairs = pairwise_influence(matrix, trained.test.pair, damping=DECAY)
    assert pairs.scores.shape == (5, trained.n)
    assert (pairs.scores - expected).abs().max() < 1e-8
    mean = influence(matrix, trained.test.pair, damping=DECAY)
    assert (mean.scores - expected.mean(0)).abs().max() < 1e-8
    own = self_influence(matrix, damping=DECAY)
    alone = -(each * torch.linalg.solve(curvature, each.T).T).sum(1)
    assert (own.scores - alone).abs().max() < 1e-8
    for found in (pairs, mean, own):
        assert found.converged
        assert found.residual < 1e-9
        assert found.count == trained.n
        assert torch.equal(found.leave_one_out, -found.scores / trained.n)
        closed = found.method == "exact: in closed form"
        assert closed == (kind in structures)


def test_leaving_out_of_ridge_is_exact_after_sherman_and_morrison():
    """``theta_-n - theta = H^-1 ∇l_n / N / (1 - h_n)``, where ``h_n = 2/N xᵀ H^-1 x``."""
    trained = Trained(classes=False)
    matrix = trained.matrix()
    found = pairwise_influence(matrix, trained.test.pair, damping=DECAY)
    residuals = trained.train.x @ trained.theta - trained.train.y
    # ∇l = 2 r x, so the influence on itself knows the leverage.
    own = self_influence(matrix, damping=DECAY).scores
    leverage = -own / (2 * residuals.square() * trained.n)
    slopes = trained.gradients(trained.test)
    for n in range(trained.n):
        change = slopes @ (trained.left_out(n) - trained.theta)
        assert (found.leave_one_out[:, n] / (1 - leverage[n]) - change).abs().max() < 1e-9


def test_leaving_out_of_logistic_regression():
    trained = Trained(classes=True, n=40)
    found = influence(trained.matrix(), trained.test.pair, damping=DECAY).leave_one_out
    before = mean_loss(trained.test, trained.theta, True)
    changes = torch.stack(
        [mean_loss(trained.test, trained.left_out(n), True) - before for n in range(40)]
    )
    assert torch.corrcoef(torch.stack([found, changes]))[0, 1] > 0.99
    assert 0.8 < (found @ changes) / changes.square().sum() < 1.25  # neither sign nor scale is off


def test_a_sample_with_more_weight_moves_the_test_loss_by_its_score():
    """The definition, by differences: ``L + eps l_n``."""
    trained, eps = Trained(classes=False), 1e-6
    scores = influence(trained.matrix(), trained.test.pair, damping=DECAY).scores
    n, (x, y) = trained.n, (trained.train.x, trained.train.y)
    for sample in (0, 7):
        ends = []
        for sign in (1, -1):
            weight = torch.full((n,), 1 / n, dtype=DTYPE)
            weight[sample] += sign * eps
            h = 2 * x.T @ (weight.unsqueeze(1) * x) + DECAY * torch.eye(4, dtype=DTYPE)
            theta = torch.linalg.solve(h, 2 * x.T @ (weight * y))
            ends.append(mean_loss(trained.test, theta, False))
        assert abs((ends[0] - ends[1]) / (2 * eps) - scores[sample]) < 1e-7


def test_the_strongest_samples():
    trained = Trained(classes=True)
    found = influence(trained.matrix(), trained.test.pair, damping=DECAY)
    order = found.scores.argsort()
    helpful, harmful = found.helpful(3), found.harmful(3)
    assert helpful.samples.tolist() == order[:3].tolist()
    assert harmful.samples.tolist() == order.flip(0)[:3].tolist()
    assert torch.equal(helpful.scores, found.scores[helpful.samples])
    assert helpful.scores[0] < 0 < harmful.scores[0]
    # Without what helps most the test loss is higher than before.
    best = int(helpful.samples[0])
    before = mean_loss(trained.test, trained.theta, True)
    assert mean_loss(trained.test, trained.left_out(best), True) > before
    pairs = pairwise_influence(trained.matrix(), trained.test.pair, damping=DECAY)
    assert pairs.harmful(2).samples.shape == (5, 2)


def test_networks_losses_of_their_own_and_some_parameters():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(6, 3, dtype=DTYPE), torch.randint(3, (6,))
    y[2] = -100  # does not count, so it has no influence
    matrix = ggn(model, F.cross_entropy, (x, y), parameters="2.*")
    test = Problem(model, F.cross_entropy, (x[:2], y[:2]), parameters="2.*")
    found = influence(matrix, test, damping=0.1)
    grads = []
    for n in range(6):
        value = F.cross_entropy(model(x[n : n + 1]), y[n : n + 1], reduction="sum") * 6 / 5
        each = torch.autograd.grad(value, [model[2].weight, model[2].bias])
        grads.append(torch.cat([g.flatten() for g in each]))
    each = torch.stack(grads)
    dense = matrix.dense() + 0.1 * torch.eye(15, dtype=DTYPE)
    # The test loss is a mean of its own two samples.
    slope = each[:2].mean(0) * 5 / 6
    assert (found.scores + each @ torch.linalg.solve(dense, slope)).abs().max() < 1e-8
    assert found.scores[2] == 0
    assert torch.equal(influence(matrix, (x[:2], y[:2]), damping=0.1).scores, found.scores)


def test_a_preconditioner_gives_the_same():
    trained = Trained(classes=True)
    near = trained.matrix(ggn, structure=Kronecker())
    plain, helped = (
        influence(trained.matrix(), trained.test.pair, damping=DECAY, preconditioner=one)
        for one in (None, near)
    )
    assert torch.allclose(plain.scores, helped.scores, rtol=1e-7, atol=1e-10)
    assert "preconditioner" in helped.method


def test_loaders_keep_their_order():
    trained = Trained(classes=False)
    loader = DataLoader(TensorDataset(*trained.train.pair), batch_size=4)
    found = influence(hessian(trained.model, F.mse_loss, loader), trained.test.pair, damping=DECAY)
    expected = influence(trained.matrix(), trained.test.pair, damping=DECAY)
    assert torch.allclose(found.scores, expected.scores, rtol=1e-8)


def errors():
    trained = Trained(classes=False)
    matrix = trained.matrix()
    shuffled = DataLoader(TensorDataset(*trained.train.pair), batch_size=4, shuffle=True)
    other = Problem(nn.Linear(4, 1, bias=False).double(), F.mse_loss, trained.test.pair)
    found = influence(matrix, trained.test.pair, damping=DECAY)
    mixed = hessian(trained.model, F.mse_loss, shuffled)
    part = next(iter(matrix.layers().values()))
    test = trained.test.pair
    return {
        "matrix": (lambda: influence(trained.hessian, test), "but must be an operator over all"),
        "part": (lambda: self_influence(part), "but must be an operator over all parameters"),
        "damping": (lambda: influence(matrix, test, damping=-1), "damping is -1 but must be"),
        "own damping": (lambda: self_influence(matrix, damping=-1), "damping is -1 but must be"),
        "test": (lambda: influence(matrix, other), "has 4 parameters, which are not the 4 of"),
        "order": (
            lambda: influence(mixed, test),
            "nobody could say which training sample a score is of",
        ),
        "test order": (
            lambda: pairwise_influence(matrix, shuffled),
            "nobody could say which test sample a score is of",
        ),
        "k": (lambda: found.helpful(0), "k is 0 but must be a whole number of at least 1"),
        "many": (lambda: found.harmful(99), "k is 99 but there are only 14 training samples"),
    }


CASES = errors()


@pytest.mark.parametrize("which", CASES)
def test_errors_say_what_to_do(which):
    call, sentence = CASES[which]
    with pytest.raises(SettingError, match=sentence):
        call()


def test_too_many_tests(monkeypatch):
    monkeypatch.setattr("natgrad.operators.requirements.LARGEST", 100)
    trained = Trained(classes=False)
    with pytest.raises(SettingError, match=r"gradients of all test samples .* give fewer of them"):
        pairwise_influence(trained.matrix(), trained.test.pair, damping=DECAY)
