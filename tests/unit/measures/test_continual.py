"""The curvature prior: a quadratic form, and the joint optimum of tasks one after another."""

import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from natgrad import EKFAC, Diagonal, EmpiricalFisher, Full, Kronecker, UnitWise
from natgrad.errors import CheckpointError, SettingError
from natgrad.measures.continual import CurvaturePrior
from natgrad.operators import fisher

DTYPE = torch.float64
STRUCTURES = {
    "kronecker": Kronecker(),
    "ekfac": EKFAC(),
    "diagonal": Diagonal(),
    "unit-wise": UnitWise(),
    "full": Full(),
}
TAU = 0.7


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2)).to(DTYPE)


def batch(n):
    return torch.randn(n, 3, dtype=DTYPE), torch.randint(2, (n,))


def flat(model):
    return torch.cat([p.flatten() for p in model.parameters()])


def move(model):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.3)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("curvature", [None, EmpiricalFisher()])
def test_the_penalty_is_the_quadratic_form_of_all_tasks(structure, curvature):
    kind = STRUCTURES[structure]
    options = {} if curvature is None else {"curvature": curvature}
    model = network()
    prior = CurvaturePrior(kind, prior_precision=TAU)
    size = flat(model).numel()
    precision = TAU * torch.eye(size, dtype=DTYPE)
    assert torch.allclose(prior.penalty(model), TAU / 2 * flat(model).square().sum())
    for n, importance in ((6, 1.0), (4, 2.5)):
        move(model)
        x, y = batch(n)
        prior.add(
            model,
            F.cross_entropy,
            [(x[:1], y[:1]), (x[1:], y[1:])],
            importance=importance,
            **options,
        )
        dense = fisher(model, F.cross_entropy, (x, y), structure=kind, **options).dense()
        precision += importance * n * dense
    mean = flat(model).detach().clone()
    assert prior.penalty(model) == 0
    move(model)
    d = flat(model).detach() - mean
    penalty = prior.penalty(model)
    assert abs(float(penalty.detach()) - float(d @ precision @ d / 2)) < 1e-9
    grads = torch.autograd.grad(penalty, list(model.parameters()), create_graph=True)
    slope = torch.cat([g.flatten() for g in grads])
    assert (slope - precision @ d).abs().max() < 1e-9
    again = torch.autograd.grad(slope @ mean, list(model.parameters()))
    curved = torch.cat([g.flatten() for g in again])
    assert (curved - precision @ mean).abs().max() < 1e-9
    assert prior.tasks == 2


def test_the_empirical_precision_of_a_square_loss_sums_squares_of_gradients():
    """A mean over samples and outputs has ``W = N D`` terms, which is not N."""
    model = nn.Linear(3, 2, bias=False).to(DTYPE)
    x, y = torch.randn(5, 3, dtype=DTYPE), torch.randn(5, 2, dtype=DTYPE)
    prior = CurvaturePrior(Full())
    prior.add(model, F.mse_loss, (x, y), importance=1.5, curvature=EmpiricalFisher())
    residual = 2 * (model(x) - y).detach()
    rows = torch.einsum("no,ni->noi", residual, x).flatten(1)
    before = flat(model).detach().clone()
    move(model)
    d = flat(model).detach() - before
    truth = 1.5 * (rows @ d).square().sum() / 2
    assert torch.allclose(prior.penalty(model).detach(), truth, rtol=1e-10)


def ridge(xs, ys, tau):
    """The joint optimum of ``Σ_n |y - W x|² + tau/2 |W|²`` over all data, ``[OUT, IN]``."""
    x, y = torch.cat(xs), torch.cat(ys)
    h = 2 * x.T @ x + tau * torch.eye(x.shape[1], dtype=DTYPE)
    return torch.linalg.solve(h, 2 * x.T @ y).T


@pytest.mark.parametrize("structure", ["kronecker", "ekfac", "unit-wise", "full"])
def test_tasks_one_after_another_reach_the_optimum_of_all(structure):
    model = nn.Linear(3, 2, bias=False).to(DTYPE)
    prior = CurvaturePrior(STRUCTURES[structure], prior_precision=TAU)
    xs = [torch.randn(n, 3, dtype=DTYPE) * scale for n, scale in ((5, 1.0), (7, 3.0), (4, 0.5))]
    ys = [torch.randn(len(x), 2, dtype=DTYPE) for x in xs]
    for task, (x, y) in enumerate(zip(xs, ys, strict=True), 1):
        # Both terms are quadratic, so one Newton step from anywhere ends at the optimum.
        move(model)
        loss = F.mse_loss(model(x), y) + prior.penalty(model) / y.numel()
        (g,) = torch.autograd.grad(loss, [model.weight], create_graph=True)
        rows = [
            torch.autograd.grad(one, [model.weight], retain_graph=True)[0] for one in g.flatten()
        ]
        h = torch.stack([row.flatten() for row in rows])
        with torch.no_grad():
            model.weight.sub_(torch.linalg.solve(h, g.flatten()).view(2, 3))
        joint = ridge(xs[:task], ys[:task], TAU)
        assert (model.weight - joint).abs().max() < 1e-9
        prior.add(model, F.mse_loss, (x, y))


def test_dense_and_diagonal_curvature_does_not_grow_with_tasks():
    for kind, grows in (("diagonal", False), ("full", False), ("kronecker", True)):
        model, prior = network(), CurvaturePrior(STRUCTURES[kind])
        sizes = []
        for _ in range(3):
            prior.add(model, F.cross_entropy, batch(4))
            sizes.append(len(prior.state_dict()["terms"]))
        assert (sizes[-1] > sizes[0]) == grows


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_saved_prior_goes_on_where_it_was(structure):
    model, kind = network(), STRUCTURES[structure]
    prior = CurvaturePrior(kind, prior_precision=TAU)
    prior.add(model, F.cross_entropy, batch(5))
    file = io.BytesIO()
    torch.save(prior.state_dict(), file)
    file.seek(0)
    other = CurvaturePrior(kind)
    other.load_state_dict(torch.load(file, weights_only=True))
    data = batch(4)
    for one in (prior, other):
        one.add(model, F.cross_entropy, data)
    move(model)
    assert torch.allclose(prior.penalty(model), other.penalty(model), rtol=1e-12)
    assert other.tasks == 2
    assert repr(other) == "<CurvaturePrior of 2 tasks over 34 parameters>"


def test_a_prior_follows_the_precision_of_the_model():
    model, prior = network(), CurvaturePrior()
    prior.add(model, F.cross_entropy, batch(5))
    move(model)
    exact = prior.penalty(model)
    found = prior.penalty(model.float())
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), exact, rtol=1e-4)


class Heads(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.trunk = nn.Linear(3, 4)
        self.head = nn.Linear(4, classes)

    def forward(self, x):
        return self.head(self.trunk(x).tanh())


def test_heads_of_tasks_are_left_out():
    first, second = Heads(2).to(DTYPE), Heads(5).to(DTYPE)
    second.trunk.load_state_dict(first.trunk.state_dict())
    prior = CurvaturePrior(parameters="trunk.*")
    prior.add(first, F.cross_entropy, batch(4))
    assert prior.penalty(second) == 0
    with torch.no_grad():
        second.head.weight.add_(1.0)
    assert prior.penalty(second) == 0
    prior.add(second, F.cross_entropy, batch(4))
    with torch.no_grad():
        second.trunk.weight.add_(1.0)
    assert prior.penalty(second) > 0


def errors():
    prior = CurvaturePrior()
    prior.add(Heads(2).to(DTYPE), F.cross_entropy, batch(4))
    state = prior.state_dict()
    strange = {**state, "terms": [{**state["terms"][0], "kind": "cubic"}]}
    more, fewer = Heads(5).to(DTYPE), Heads(2).to(DTYPE)
    fewer.head.requires_grad_(False)
    return {
        "structure": (lambda: CurvaturePrior(None), "structure=None, the matrix of all parameters"),
        "prior": (lambda: CurvaturePrior(prior_precision=-1), "prior_precision is -1 but must be"),
        "importance": (
            lambda: prior.add(more, F.cross_entropy, batch(4), importance=-1),
            "importance is -1 but must be",
        ),
        "other": (lambda: prior.penalty(more), r"it has 'head.weight' of shape \[5, 4\], which th"),
        "fewer": (lambda: prior.penalty(fewer), "does not have the 4 parameters of earlier tasks"),
        "added": (
            lambda: prior.add(more, F.cross_entropy, batch(4)),
            "Leave out what tasks do not",
        ),
        "keys": (lambda: prior.load_state_dict({"tasks": 1}), "lacks or has too much of"),
        "kind": (lambda: prior.load_state_dict(strange), "a matrix of the kind 'cubic' but only"),
    }


CASES = errors()


@pytest.mark.parametrize("which", CASES)
def test_errors_say_what_to_do(which):
    call, sentence = CASES[which]
    kind = CheckpointError if which in ("keys", "kind") else SettingError
    with pytest.raises(kind, match=sentence):
        call()


def test_a_structure_with_another_matrix_cannot_be_kept():
    class Odd(Diagonal):
        def matrix(self, *args):
            found = super().matrix(*args)
            found.__class__ = type("OddMatrix", (type(found),), {})
            return found

    prior = CurvaturePrior(Odd())
    with pytest.raises(SettingError, match="matrix is a OddMatrix but only"):
        prior.add(network(), F.cross_entropy, batch(4))
