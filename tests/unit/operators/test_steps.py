"""Second-order steps against dense solves with matrices from autograd, in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from natgrad import EmpiricalFisher, Kronecker
from natgrad.errors import SettingError
from natgrad.operators import Problem, fisher, ggn, hessian
from natgrad.operators.jacobian import jacobian
from natgrad.operators.steps import (
    apply_,
    gauss_newton,
    gram_gauss_newton,
    natural_gradient,
    powered_gradient,
)

N, CLASSES = 6, 3
DAMPING = 0.01


class Scaled(nn.Module):
    """A parameter that belongs to no known layer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(5, CLASSES)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, CLASSES))

    def forward(self, x):
        return self.inner(x).tanh() * self.scale


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, CLASSES)),
    "own parameter": Scaled,
}
LOSSES = {"cross-entropy": F.cross_entropy, "square": F.mse_loss}


def setting(model="mlp", loss="cross-entropy"):
    net = MODELS[model]().double()
    x = torch.randn(N, 5, dtype=torch.float64)
    y = (
        torch.randint(CLASSES, (N,))
        if loss == "cross-entropy"
        else torch.randn(N, CLASSES).double()
    )
    return net, LOSSES[loss], x, y


def dense(net, loss, x, y):
    """``J [N, C, P]``, ``G [P, P]`` and the gradient of the mean loss, all from autograd."""
    names, sizes = zip(*((n, p.shape) for n, p in net.named_parameters()), strict=True)
    theta = torch.cat([p.detach().flatten() for p in net.parameters()])

    def outputs(flat):
        parts = flat.split([s.numel() for s in sizes])
        named = {n: part.view(s) for n, part, s in zip(names, parts, sizes, strict=True)}
        return functional_call(net, named, (x,))

    def mean(f):
        return loss(f, y)

    J = torch.autograd.functional.jacobian(outputs, theta)
    curvature = torch.autograd.functional.hessian(mean, outputs(theta).detach())
    g = torch.autograd.functional.jacobian(lambda t: mean(outputs(t)), theta)
    return J, torch.einsum("ncp,ncmd,mdq->pq", J, curvature, J), g


def split(x, y):
    """Batches of unequal sizes."""
    return [(x[:1], y[:1]), (x[1:4], y[1:4]), (x[4:], y[4:])]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("batches", [1, 3])
def test_all_steps_solve_the_dense_system(model, loss, batches):
    net, function, x, y = setting(model, loss)
    _, G, g = dense(net, function, x, y)
    data = (x, y) if batches == 1 else split(x, y)
    matrix = ggn(net, function, data)
    step = torch.linalg.solve(G + DAMPING * torch.eye(len(G), dtype=G.dtype), g)
    size = step.norm()
    for found in (
        natural_gradient(fisher(net, function, data), DAMPING),
        gauss_newton(matrix, DAMPING),
        gram_gauss_newton(matrix, DAMPING),
        powered_gradient(matrix, 1.0, DAMPING),
    ):
        assert (found - step).norm() < 1e-9 * size


def test_the_jacobian_has_a_row_for_every_output_of_every_sample():
    net, function, x, y = setting()
    J, _, _ = dense(net, function, x, y)
    own = jacobian(Problem(net, function, split(x, y)))
    assert torch.allclose(torch.cat(list(own.rows())), J.flatten(0, 1), rtol=1e-12, atol=1e-14)
    flat = J.flatten(0, 1)
    assert torch.allclose(own.gram(), flat @ flat.T, rtol=1e-12, atol=1e-14)
    u = torch.randn(len(flat), 2, dtype=torch.float64)
    assert torch.allclose(own.combined(u), flat.T @ u, rtol=1e-12, atol=1e-13)


def test_without_damping_the_gram_step_is_the_shortest_of_all():
    net, function, x, y = setting(loss="square")
    J, _, _ = dense(net, function, x, y)
    r = (net(x) - y).detach().flatten()
    shortest = torch.linalg.lstsq(J.flatten(0, 1), r).solution
    found = gram_gauss_newton(ggn(net, function, (x, y)))
    assert (found - shortest).norm() < 1e-8 * shortest.norm()


def test_a_full_gram_step_of_a_linear_model_fits_the_data():
    net, x = nn.Linear(9, 2).double(), torch.randn(4, 9, dtype=torch.float64)
    y = torch.randn(4, 2, dtype=torch.float64)
    apply_(net, gram_gauss_newton(ggn(net, F.mse_loss, (x, y))))
    assert (net(x) - y).abs().max() < 1e-10


@pytest.mark.parametrize("exponent", [0.0, 0.3, 0.5, 1.0])
def test_powers_are_those_of_eigenvalues(exponent):
    net, function, x, y = setting()
    _, G, g = dense(net, function, x, y)
    values, vectors = torch.linalg.eigh(G)
    scale = (values.clamp(min=0) + DAMPING) ** -exponent
    expected = vectors @ (scale * (vectors.T @ g))
    found = powered_gradient(fisher(net, function, (x, y)), exponent, DAMPING)
    assert (found - expected).norm() < 1e-9 * expected.norm()


def test_steps_take_structures_and_gradients_of_other_batches():
    net, function, x, y = setting()
    matrix = ggn(net, function, (x, y), structure=Kronecker())
    other = Problem(net, function, (x[:2], y[:2])).gradient()
    expected = matrix.solve(other, DAMPING)
    named = matrix.space.named(other)
    steps = [
        natural_gradient(matrix, DAMPING, named),
        gauss_newton(matrix, DAMPING, named),
        powered_gradient(matrix, 1.0, DAMPING, named),
    ]
    for step in steps:
        assert list(step) == list(dict(net.named_parameters()))
        assert torch.allclose(matrix.space.flat(step), expected, rtol=1e-10)
    assert torch.allclose(natural_gradient(matrix, DAMPING, other), expected, rtol=1e-10)


@pytest.mark.parametrize("kind", ["flat", "dict", "problem"])
def test_apply_goes_against_the_update(kind):
    net, function, x, y = setting()
    problem = Problem(net, function, (x, y), parameters="2.*")
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    step = {n: torch.randn_like(p) for n, p in before.items()}
    if kind == "flat":
        apply_(net, torch.cat([s.flatten() for s in step.values()]), lr=0.5)
    elif kind == "dict":
        apply_(net, step, lr=0.5)
    else:
        apply_(problem, {n: step[n] for n in problem.space.names}, lr=0.5)
    moved = problem.space.names if kind == "problem" else tuple(before)
    for name, p in net.named_parameters():
        expected = before[name] - 0.5 * step[name] if name in moved else before[name]
        assert torch.equal(p, expected)


def errors():
    net, function, x, y = setting()
    matrix = ggn(net, function, (x, y))
    structured = ggn(net, function, (x, y), structure=Kronecker())
    return {
        "natural": (lambda: natural_gradient(matrix), "Fisher|GGN with damping 0 is singular"),
        "gram": (lambda: gram_gauss_newton(matrix), "Gram-Gauss-Newton with damping 0 is singular"),
        "structure": (lambda: gram_gauss_newton(structured, 1.0), "without a structure"),
        "empirical": (
            lambda: gram_gauss_newton(
                fisher(net, function, (x, y), curvature=EmpiricalFisher()), 1.0
            ),
            "needs the whole Gauss-Newton matrix but got <empirical Fisher",
        ),
        "hessian": (lambda: gram_gauss_newton(hessian(net, function, (x, y))), "<Hessian"),
        "damping": (lambda: natural_gradient(matrix, -1.0), "damping is -1.0 but must be"),
        "exponent": (lambda: powered_gradient(matrix, 1.5), r"exponent is 1.5 but must be in \[0"),
        "flat size": (lambda: apply_(net, torch.zeros(3)), r"shape \[3\] but there are 39"),
        "dict names": (lambda: apply_(net, {"0.weight": x}), "lacks '0.bias'"),
    }


@pytest.mark.parametrize("which", errors())
def test_errors_say_what_to_do(which):
    call, sentence = errors()[which]
    with pytest.raises(SettingError, match=sentence):
        call()
