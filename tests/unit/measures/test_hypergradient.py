"""Hypergradients of ridge and logistic regression: the closed form, and retraining."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from natgrad import Kronecker
from natgrad.curvature.losses import CrossEntropy, OwnLoss
from natgrad.errors import SettingError
from natgrad.measures.hypergradient import hypergradient, parameter_response
from natgrad.measures.solvers import ConjugateGradients, KroneckerInverse, Neumann
from natgrad.operators import Problem, ggn
from unit.measures.regression import DTYPE, draw, linear, logistic, mean_loss, ridge

DECAY = 0.3
TRAIN = {False: ridge, True: logistic}


class Setting:
    """One output, and a decay for each weight as hyperparameters ``[d]``."""

    def __init__(self, classes):
        self.classes = classes
        self.train, self.test = draw(classes=classes), draw(classes=classes, seed=1)
        self.decay = torch.linspace(0.2, 0.5, 4, dtype=DTYPE).requires_grad_()
        self.theta, self.hessian = TRAIN[classes](self.train, self.decay.detach())
        self.model = linear(self.theta)
        self.loss = F.binary_cross_entropy_with_logits if classes else F.mse_loss

    def penalty(self):
        return (self.decay * self.model.weight.square()).sum() / 2

    def training(self):
        x, y = self.train.pair
        return self.loss(self.model(x), y) + self.penalty()

    def validation(self):
        x, y = self.test.pair
        return self.loss(self.model(x), y)

    def problems(self, batches=1):
        """With the penalty inside of the loss, as a problem has no other place for it."""
        x, y = self.train.pair
        data = (x, y) if batches == 1 else [(x[:5], y[:5]), (x[5:], y[5:])]
        own = OwnLoss(lambda f, y: self.loss(f, y) + self.penalty())
        return Problem(self.model, own, data), Problem(self.model, self.loss, self.test.pair)

    def closed_form(self):
        """``-theta ∘ H^-1 ∂L_val/∂theta``."""
        g = torch.autograd.functional.jacobian(
            lambda t: mean_loss(self.test, t, self.classes), self.theta
        )
        return -self.theta * torch.linalg.solve(self.hessian, g)

    def differences(self, step=1e-5):
        """Of the validation loss after training anew."""
        found = []
        for unit in torch.eye(4, dtype=DTYPE):
            ends = []
            for sign in (1, -1):
                theta, _ = TRAIN[self.classes](self.train, self.decay.detach() + sign * step * unit)
                ends.append(mean_loss(self.test, theta, self.classes))
            found.append((ends[0] - ends[1]) / (2 * step))
        return torch.stack(found)


@pytest.fixture(params=[False, True], ids=["ridge", "logistic"])
def setting(request):
    return Setting(request.param)


@pytest.mark.parametrize("kind", ["functions", "problems", "batches"])
def test_conjugate_gradients_find_the_closed_form(setting, kind):
    if kind == "functions":
        found = hypergradient(
            setting.training, setting.validation, setting.decay, parameters=setting.model
        )
    else:
        problems = setting.problems(1 if kind == "problems" else 2)
        found = hypergradient(*problems, setting.decay)
    assert (found.gradient - setting.closed_form()).abs().max() < 1e-8
    assert (found.gradient - setting.differences()).abs().max() < 1e-7
    assert found.converged
    assert found.residual < 1e-8
    assert found.slope < 1e-12
    assert not found.direct.any()


def test_few_terms_of_neumann_are_the_truncated_series(setting):
    step, terms = 0.2, 5
    g = torch.autograd.functional.jacobian(
        lambda t: mean_loss(setting.test, t, setting.classes), setting.theta
    )
    x, power = torch.zeros_like(g), g
    for _ in range(terms):
        x, power = x + step * power, power - step * (setting.hessian @ power)
    found = hypergradient(
        setting.training,
        setting.validation,
        setting.decay,
        parameters=setting.model,
        solver=Neumann(terms, step),
    )
    assert torch.allclose(found.solution.x, x, rtol=1e-12)
    assert torch.allclose(found.gradient, -setting.theta * x, rtol=1e-12)
    left = (g - setting.hessian @ x).norm() / g.norm()
    assert abs(found.residual - float(left)) < 1e-12
    assert found.converged == (found.residual <= 1e-2)


def test_many_terms_of_neumann_find_the_closed_form(setting):
    solver = Neumann(terms=400, step=0.3)
    found = hypergradient(*setting.problems(), setting.decay, solver=solver)
    assert (found.gradient - setting.closed_form()).abs().max() < 1e-9
    assert found.converged


def test_a_kronecker_inverse_is_exact_where_the_matrix_is():
    setting = Setting(classes=False)
    decay = torch.tensor(DECAY, dtype=DTYPE, requires_grad=True)
    theta, hessian = ridge(setting.train, DECAY)
    model = linear(theta)
    x, y = setting.train.pair
    matrix = ggn(model, F.mse_loss, (x, y), structure=Kronecker())

    def training():
        return F.mse_loss(model(x), y) + decay / 2 * model.weight.square().sum()

    solver = KroneckerInverse(damping=DECAY, matrix=matrix)
    xt, yt = setting.test.pair
    found = hypergradient(
        training, lambda: F.mse_loss(model(xt), yt), decay, parameters=model, solver=solver
    )
    g = torch.autograd.functional.jacobian(lambda t: mean_loss(setting.test, t, False), theta)
    assert abs(float(found.gradient + theta @ torch.linalg.solve(hessian, g))) < 1e-10
    assert found.converged
    assert found.residual < 1e-12
    rough = KroneckerInverse(damping=1.0, matrix=matrix)
    found = hypergradient(
        training, lambda: F.mse_loss(model(xt), yt), decay, parameters=model, solver=rough
    )
    assert not found.converged
    assert found.residual > 0.1


def test_a_kronecker_inverse_of_the_problem_itself():
    """The hyperparameters scale the inputs, so the penalty is not needed."""
    data = draw(n=12)
    scale = torch.ones(4, dtype=DTYPE, requires_grad=True)

    class Scaled(nn.Module):
        def __init__(self, theta):
            super().__init__()
            self.inner = linear(theta)

        def forward(self, x):
            return self.inner(x * scale)

    model = Scaled(ridge(data, 0.0)[0])
    train = Problem(model, F.mse_loss, data.pair)
    validation = Problem(model, F.mse_loss, draw(seed=1).pair)
    exact = hypergradient(train, validation, scale)
    found = hypergradient(train, validation, scale, solver=KroneckerInverse(damping=0.0))
    assert torch.allclose(found.gradient, exact.gradient, rtol=1e-7, atol=1e-9)
    # The validation loss sees the scale directly too, and training undoes what it does.
    assert exact.direct.abs().max() > 1e-3
    assert exact.gradient.abs().max() < 1e-8


def test_a_preconditioner_gives_the_same_with_fewer_products(setting):
    x, y = setting.train.pair
    near = ggn(setting.model, setting.loss, (x, y), structure=Kronecker())
    plain, helped = (
        hypergradient(
            setting.training,
            setting.validation,
            setting.decay,
            parameters=setting.model,
            solver=ConjugateGradients(damping=0.1, preconditioner=one),
        )
        for one in (None, near)
    )
    assert torch.allclose(plain.gradient, helped.gradient, rtol=1e-6)
    assert helped.solution.products <= plain.solution.products


def test_damping_is_added_to_the_hessian(setting):
    found = hypergradient(
        setting.training,
        setting.validation,
        setting.decay,
        parameters=setting.model,
        solver=ConjugateGradients(damping=0.7),
    )
    g = torch.autograd.functional.jacobian(
        lambda t: mean_loss(setting.test, t, setting.classes), setting.theta
    )
    damped = setting.hessian + 0.7 * torch.eye(4, dtype=DTYPE)
    assert torch.allclose(found.solution.x, torch.linalg.solve(damped, g), rtol=1e-7)


@pytest.mark.parametrize("kind", ["function", "problem"])
def test_the_response_is_the_derivative_of_the_trained_weights(setting, kind):
    if kind == "function":
        found = parameter_response(setting.training, setting.decay, parameters=setting.model)
    else:
        found = parameter_response(setting.problems(2)[0], setting.decay)
    expected = -torch.linalg.solve(setting.hessian, torch.diag(setting.theta))
    assert found.jacobian.shape == (4, 4)
    assert (found.jacobian - expected).abs().max() < 1e-8
    assert found.converged
    assert found.residual < 1e-8


def test_results_are_of_the_kind_of_the_hyperparameters():
    setting = Setting(classes=False)
    weights = torch.ones(12, dtype=DTYPE, requires_grad=True)
    x, y = setting.train.pair

    def training():
        each = (setting.model(x) - y).square().squeeze(1)
        return (weights * each).mean() + setting.penalty()

    given = {"decay": setting.decay, "weights": weights}
    found = hypergradient(training, setting.validation, given, parameters=setting.model)
    assert list(found.gradient) == ["decay", "weights"]
    assert torch.allclose(found.gradient["decay"], setting.closed_form(), rtol=1e-7)
    listed = hypergradient(
        training, setting.validation, list(given.values()), parameters=setting.model
    )
    assert torch.equal(listed.gradient[1], found.gradient["weights"])
    # More weight on sample n moves theta by -H^-1 ∇l_n / N.
    g = torch.autograd.functional.jacobian(
        lambda t: mean_loss(setting.test, t, False), setting.theta
    )
    residual = (setting.model(x) - y).detach()
    each = 2 * residual * x / 12
    expected = -each @ torch.linalg.solve(setting.hessian, g)
    assert torch.allclose(found.gradient["weights"], expected, rtol=1e-6)
    both = parameter_response(training, given, parameters=setting.model)
    assert both.jacobian["weights"].shape == (4, 12)
    assert torch.allclose(
        both.jacobian["weights"], -torch.linalg.solve(setting.hessian, each.T), rtol=1e-6
    )


def test_a_hyperparameter_may_be_a_frozen_part_of_the_model():
    data = draw()

    class Offset(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = linear(torch.zeros(4, dtype=DTYPE))
            self.offset = nn.Parameter(torch.zeros(1, dtype=DTYPE))

        def forward(self, x):
            return self.inner(x) + self.offset

    model = Offset()
    with torch.no_grad():
        model.inner.weight.copy_(ridge(data, 0.0)[0].unsqueeze(0))
    train = Problem(model, F.mse_loss, data.pair, parameters="inner.*")
    test = draw(seed=1)
    validation = Problem(model, F.mse_loss, test.pair, parameters="inner.*")
    found = hypergradient(train, validation, model.offset)

    def trained(offset):
        from unit.measures.regression import Data

        theta, _ = ridge(Data(data.x, data.y - offset), 0.0)
        return F.mse_loss(test.x @ theta + offset, test.y)

    assert abs(float(found.gradient) - float(trained(1e-5) - trained(-1e-5)) / 2e-5) < 1e-7
    assert model.offset.requires_grad


def test_a_linear_training_loss_has_no_curvature():
    weight = nn.Parameter(torch.ones(3, dtype=DTYPE))
    factor = torch.ones(3, dtype=DTYPE, requires_grad=True)
    found = hypergradient(
        lambda: (factor * weight).sum(),
        lambda: weight.square().sum(),
        factor,
        parameters={"w": weight},
        solver=Neumann(1, 1.0),
    )
    assert torch.equal(found.gradient, torch.full((3,), -2.0, dtype=DTYPE))
    assert not found.converged
    found = hypergradient(
        lambda: weight.sum(),
        lambda: (factor * weight).sum(),
        factor,
        parameters={"w": weight},
        solver=Neumann(1, 1.0),
    )
    assert torch.equal(found.gradient, weight)
    assert found.residual == 1.0


def test_attention_can_be_differentiated_twice():
    torch.manual_seed(0)
    x = torch.randn(2, 1, 3, 4, dtype=DTYPE)
    weight = nn.Parameter(torch.randn(4, 4, dtype=DTYPE))
    scale = torch.ones(4, dtype=DTYPE, requires_grad=True)

    def training(kernel=F.scaled_dot_product_attention):
        h = (x * scale) @ weight
        return kernel(h, h, h).square().mean()

    def by_hand(q, k, v):
        return (q @ k.mT / 2).softmax(-1) @ v

    found, expected = (
        hypergradient(
            lambda kernel=kernel: training(kernel),
            lambda: weight.square().sum(),
            scale,
            parameters={"w": weight},
            solver=Neumann(3, 0.1),
        )
        for kernel in (F.scaled_dot_product_attention, by_hand)
    )
    assert torch.allclose(found.gradient, expected.gradient, rtol=1e-9)


def errors():
    s = Setting(classes=False)
    train, validation = s.problems()
    free = ggn(s.model, F.mse_loss, s.train.pair)
    wide = nn.Linear(7, 1).double()
    pair = torch.randn(2, 7, dtype=DTYPE), torch.randn(2, 1, dtype=DTYPE)
    other = ggn(wide, F.mse_loss, pair, structure=Kronecker())
    weighted = Problem(
        nn.Linear(4, 2).double(),
        CrossEntropy(class_weights=torch.ones(2, requires_grad=True)),
        (s.train.x, torch.ones(12, dtype=torch.long)),
    )
    unused = torch.ones(2, requires_grad=True)

    def call(train=s.training, validation=s.validation, h=s.decay, p=s.model, **solver):
        return lambda: hypergradient(train, validation, h, parameters=p, **solver)

    return {
        "no parameters": (call(p=None), "parameters is of type NoneType but a loss that is a"),
        "two parameters": (call(train=train), "has its parameters already: leave parameters="),
        "no loss": (call(train=3), "The training loss is of type int but must be a Problem"),
        "no validation": (call(validation=None), "The validation loss is of type NoneType"),
        "model for loss": (call(validation=s.model), "The validation loss is of type Linear"),
        "no number": (call(train=lambda: 1.0), "The training loss returned .*float.* but must"),
        "vector": (
            call(validation=lambda: s.model.weight),
            r"loss returned shape \[1, 4",
        ),
        "no gradient": (call(train=lambda: torch.ones(())), "must return one number that depends"),
        "no hyper": (call(h=[]), "There are no hyperparameters"),
        "detached": (call(h=[s.decay.detach()]), r"hyperparameters\[0\] is a tensor without grad"),
        "number": (call(h={"decay": 0.1}), "decay is 0.1 but must be a tensor"),
        "unused": (call(h=[s.decay, unused]), r"hyperparameters\[1\] is in neither loss"),
        "overlap": (call(h=s.model.weight), "hyperparameters is the parameter 'weight', which"),
        "another model": (
            lambda: hypergradient(train, Problem(wide, F.mse_loss, pair), s.decay),
            "validation problem does not have the parameter 'weight'",
        ),
        "class weights": (
            lambda: hypergradient(weighted, validation, s.decay),
            "class_weights has requires_grad=True, but the mean is divided",
        ),
        "solver": (call(solver="cg"), "solver is 'cg' but must be ConjugateGradients"),
        "step": (lambda: Neumann(3, 0.0), "Neumann.step is 0.0 but must be"),
        "terms": (lambda: Neumann(0, 0.1), "Neumann.terms is 0 but must be a whole number"),
        "diverging": (call(solver=Neumann(200, 500.0)), "grew beyond all numbers within 200"),
        "damping": (lambda: KroneckerInverse(-1.0), "KroneckerInverse.damping is -1.0 but"),
        "tolerance": (lambda: ConjugateGradients(tolerance=2.0), "tolerance is 2.0 but must be in"),
        "limit": (lambda: ConjugateGradients(limit=0), "ConjugateGradients.limit is 0"),
        "open matrix": (lambda: KroneckerInverse(0.1, free), "matrix is <GGN of 4 parameters> but"),
        "open preconditioner": (
            lambda: ConjugateGradients(preconditioner=free),
            "ConjugateGradients.preconditioner is <GGN",
        ),
        "no matrix": (call(solver=KroneckerInverse(0.1)), "the training loss is a function, of w"),
        "other size": (
            call(solver=KroneckerInverse(0.1, other)),
            "does not fit the 4 parameters of the training loss",
        ),
        "other preconditioner": (
            call(solver=ConjugateGradients(preconditioner=other)),
            "does not fit the 4 parameters of the training loss",
        ),
    }


CASES = errors()


@pytest.mark.parametrize("which", CASES)
def test_errors_say_what_to_do(which):
    call, sentence = CASES[which]
    with pytest.raises(SettingError, match=sentence):
        call()


def test_a_diverging_sum_says_so():
    setting = Setting(classes=False)
    found = hypergradient(*setting.problems(), setting.decay, solver=Neumann(3, 5.0))
    assert not found.converged
    assert "the sum diverges: give a smaller step" in found.solution.method


def test_a_response_that_cannot_be_written_out():
    many = torch.ones(1).expand(2**30).requires_grad_()
    model = linear(torch.ones(4, dtype=DTYPE))
    with pytest.raises(SettingError, match="use hypergradient, or fewer of them"):
        parameter_response(lambda: model.weight.sum(), many, parameters=model)
