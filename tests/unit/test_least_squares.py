"""LeastSquares: its products and its quadratic model beside dense Jacobians, and what it does where
the model is wrong."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn

import natgrad
from natgrad.errors import SettingError
from natgrad.kfac.ranks.team import Team
from natgrad.least_squares import HALVINGS, LeastSquares, flat, minimum, products, weighted
from natgrad.schedules import LevenbergMarquardt

WEIGHTS = (1.0, 20.0)


def network(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    return model.to(dtype)


def slope(u, x):
    return torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]


def residuals(model, n=30):
    """``u'' + π² sin(πx)``, and the values at both ends: the solution is ``sin(πx)``."""
    dtype = next(model.parameters()).dtype
    x = torch.linspace(0, 1, n, dtype=dtype).unsqueeze(1).requires_grad_()
    interior = slope(slope(model(x), x), x) + torch.pi**2 * (torch.pi * x).sin()
    return interior, model(torch.tensor([[0.0], [1.0]], dtype=dtype))


def loss_of(model):
    terms = zip(WEIGHTS, residuals(model), strict=True)
    return float(sum(w * r.detach().square().mean() for w, r in terms))


def weights_of(model):
    return flat(p.detach() for p in model.parameters())


def jacobian(model):
    """``[entries, parameters]``, one entry after the other."""
    entries, own = flat(weighted(residuals(model), WEIGHTS)), list(model.parameters())
    rows = [torch.autograd.grad(e, own, retain_graph=True, materialize_grads=True) for e in entries]
    return torch.stack([flat(row) for row in rows])


def test_products_are_those_of_the_dense_jacobian():
    model = network()
    own = list(model.parameters())
    directions = [[torch.randn_like(p) for p in own] for _ in range(2)]
    found = products(weighted(residuals(model), WEIGHTS), own, directions)
    right = torch.stack([jacobian(model) @ flat(d) for d in directions])
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)


def test_half_of_the_squares_of_weighted_residuals_is_the_loss():
    model = network()
    terms = flat(weighted(residuals(model), WEIGHTS)).detach()
    assert float(terms.square().sum() / 2) == pytest.approx(loss_of(model), rel=1e-12)


def test_the_minimum_is_that_of_the_model_among_all_sums_of_the_directions():
    torch.manual_seed(0)
    jacobian, gradient = torch.randn(9, 6).double(), torch.randn(6).double()
    paths = torch.randn(2, 6).double() * torch.tensor([[1.0], [1e-6]]).double()
    matrix = jacobian.mT @ jacobian + 0.1 * torch.eye(6).double()
    shares, promised = minimum(paths @ jacobian.mT, paths, gradient, 0.1)
    right = -torch.linalg.solve(paths @ matrix @ paths.mT, paths @ gradient)
    torch.testing.assert_close(shares, right, rtol=1e-8, atol=0.0)
    d = shares @ paths
    assert promised == pytest.approx(float(gradient @ d + d @ matrix @ d / 2), rel=1e-10)


def test_two_directions_that_are_one():
    """Shares are not unique then, but the step is."""
    gradient, one = torch.ones(3).double(), torch.arange(1.0, 4.0).double()
    shares, _ = minimum(torch.stack([one, 2 * one]), torch.stack([one, 2 * one]), gradient, 0.0)
    alone, _ = minimum(one[None], one[None], gradient, 0.0)
    torch.testing.assert_close(shares[0] + 2 * shares[1], alone[0])


def test_a_linear_problem_is_solved_in_one_step():
    """One layer with one output: K-FAC's block is the Gauss-Newton matrix itself."""
    torch.manual_seed(1)
    model, x, y = nn.Linear(3, 1).double(), torch.randn(20, 3).double(), torch.randn(20, 1).double()
    optimizer = LeastSquares(model, damping=1e-12)
    before = optimizer.step(lambda: model(x) - y)
    inputs = torch.cat([x, torch.ones(20, 1).double()], 1)
    best = torch.linalg.lstsq(inputs, y).solution[:, 0]
    torch.testing.assert_close(weights_of(model), best, rtol=1e-8, atol=1e-8)
    assert float(before) > float((model(x) - y).detach().square().mean())


def test_a_second_step_goes_along_the_last_one_as_well():
    """As the dense quadratic model has it, with the direction of a twin of K-FAC."""
    model = network()
    optimizer = LeastSquares(model, weights=WEIGHTS, damping=1e-3)
    optimizer.step(lambda: residuals(model))
    last = flat(optimizer.state[p]["last"] for p in model.parameters())
    twin = copy.deepcopy(optimizer)
    twin_model = twin.kfac.model
    twin.kfac.capture.ignores = False
    twin.zero_grad()
    twin.kfac.residuals(*residuals(twin_model), weights=WEIGHTS).backward()
    gradient = flat(p.grad for p in twin_model.parameters())
    twin.kfac.step()
    paths = torch.stack([flat(-p.grad for p in twin_model.parameters()), last])
    dense = jacobian(model)
    matrix = paths @ (dense.mT @ dense + 1e-3 * torch.eye(len(last)).double()) @ paths.mT
    right = -torch.linalg.solve(matrix, paths @ gradient) @ paths
    before = weights_of(model)
    optimizer.step(lambda: residuals(model))
    moved = weights_of(model) - before
    share = float(moved @ right / (right @ right))  # 1, or a power of 1/2
    assert share in [pytest.approx(0.5**k, rel=1e-6) for k in range(HALVINGS)]
    torch.testing.assert_close(moved, share * right, rtol=1e-6, atol=1e-12)


def test_a_physics_informed_network_and_no_step_up():
    model = network()
    optimizer = LeastSquares(model, weights=WEIGHTS)
    losses = [float(optimizer.step(lambda: residuals(model))) for _ in range(40)]
    assert all(b <= a for a, b in pairwise(losses))
    assert losses[-1] < 1e-5 * losses[0]
    x = torch.linspace(0, 1, 50).double().unsqueeze(1)
    assert float((model(x) - (torch.pi * x).sin()).detach().abs().max()) < 1e-2


def steep(model, x):
    """Far from linear: a whole step of the quadratic model overshoots."""
    return (20 * model(x)).atan()


def test_a_step_that_overshoots_is_halved_and_damped():
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, 0.2)
    x = torch.ones(4, 1).double()
    optimizer = LeastSquares(model, damping=LevenbergMarquardt(1e-6, every=1, decay=0.5))
    calls = []
    before = float(optimizer.step(lambda: calls.append(0) or steep(model, x)))
    assert len(calls) > 2
    assert float(steep(model, x).detach().square().mean()) < before
    assert optimizer.kfac.settings.adapted == 2e-6


def test_a_step_that_helps_nowhere_is_not_taken():
    model = network()
    optimizer = LeastSquares(model, weights=WEIGHTS)
    optimizer.step(lambda: residuals(model))
    start, calls = weights_of(model), []

    def closure():
        calls.append(0)
        return [r if len(calls) == 1 else r + 1e3 for r in residuals(model)]

    damping = optimizer.kfac.settings.adapted
    optimizer.step(closure)
    assert torch.equal(weights_of(model), start)
    assert len(calls) == 1 + HALVINGS
    assert not any("last" in state for state in optimizer.state.values())
    assert optimizer.kfac.settings.adapted > damping


def test_residuals_that_are_not_finite_move_nothing():
    model = network()
    optimizer = LeastSquares(model, weights=WEIGHTS)
    optimizer.step(lambda: residuals(model))
    start = weights_of(model)
    optimizer.step(lambda: [r * float("nan") for r in residuals(model)])
    assert torch.equal(weights_of(model), start)
    before = loss_of(model)
    optimizer.step(lambda: residuals(model))
    assert loss_of(model) < before


def test_a_usual_step_computes_the_residuals_twice():
    model, calls = network(), []
    optimizer = LeastSquares(model, weights=WEIGHTS, damping=10.0)
    optimizer.step(lambda: calls.append(0) or residuals(model))
    assert len(calls) == 2


def test_what_is_computed_between_steps_does_not_count():
    model, other = network(), network()
    optimizer, plain = (LeastSquares(m, weights=WEIGHTS) for m in (model, other))
    for _ in range(3):
        optimizer.step(lambda: residuals(model))
        plain.step(lambda: residuals(other))
        interior, border = residuals(model, 7)
        (interior.sum() + border.sum()).backward()
    assert torch.equal(weights_of(model), weights_of(other))


def test_goes_on_from_a_checkpoint():
    model = network()
    optimizer = LeastSquares(model, weights=WEIGHTS)
    for _ in range(4):
        optimizer.step(lambda: residuals(model))
    other = network(1)
    other.load_state_dict(model.state_dict())
    resumed = LeastSquares(other, weights=WEIGHTS)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(3):
        optimizer.step(lambda: residuals(model))
        resumed.step(lambda: residuals(other))
    assert torch.equal(weights_of(model), weights_of(other))
    assert optimizer.kfac.settings.adapted == resumed.kfac.settings.adapted
    with pytest.raises(SettingError, match="no kfac"):
        optimizer.load_state_dict(torch.optim.SGD(model.parameters()).state_dict())


def replaced(model):
    model[2] = nn.Linear(8, 8).double()


def appended(model):
    model.append(nn.Linear(1, 1).double())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("change", [replaced, appended])
def test_what_the_model_has_now_is_trained(change):
    model = network()
    optimizer = LeastSquares(model, weights=WEIGHTS)
    for _ in range(2):
        optimizer.step(lambda: residuals(model))
    change(model)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step(lambda: residuals(model))
    moved = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert all(moved)
    own = set(model.parameters())
    assert {p for group in optimizer.param_groups for p in group["params"]} == own
    assert set(optimizer.state) <= own


def test_damping_adapts_as_often_as_the_rule_says():
    model = network()
    rule = LevenbergMarquardt(start=1e-3, every=3, decay=0.5)
    optimizer, found = LeastSquares(model, weights=WEIGHTS, damping=rule), []
    for _ in range(7):
        optimizer.step(lambda: residuals(model))
        found.append(optimizer.kfac.settings.adapted)
    assert found[0] == found[1] == found[2]
    assert found[3] == found[4] == found[5]
    assert len({found[0], found[3], found[6]}) > 1


def test_single_precision():
    model = network(dtype=torch.float32)
    optimizer = LeastSquares(model, weights=WEIGHTS)
    losses = [float(optimizer.step(lambda: residuals(model))) for _ in range(20)]
    assert losses[-1] < 0.01 * losses[0]
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_what_is_refused(monkeypatch):
    model = network()
    with pytest.raises(SettingError, match="needs one number for the quadratic model"):
        LeastSquares(model, damping=natgrad.Relative(0.1))
    with pytest.raises(SettingError, match="got no closure"):
        LeastSquares(model).step()
    with pytest.raises(SettingError, match="1 weights for 2 residuals"):
        LeastSquares(model, weights=[1.0]).step(lambda: residuals(model))
    monkeypatch.setattr(Team, "alone", property(lambda self: False))
    with pytest.raises(SettingError, match="is for one process"):
        LeastSquares(model)
