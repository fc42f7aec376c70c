"""`natgrad.lengths.Dogleg`: the optimizer's own update, lengthened along the natural gradient."""

import copy
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adadelta, Adam, AdamW, Optimizer

import natgrad
from natgrad import KFAC, Cholesky, Full, Kronecker, NaturalMuon, Relative, SumLoss
from natgrad.errors import SettingError
from natgrad.kfac import slices
from natgrad.lengths import Dogleg
from natgrad.lengths.dogleg import Legs
from natgrad.schedules import LevenbergMarquardt

OFTEN = {"update_every": 1, "refresh_every": 1}


# The step over both legs, on dense quadratics.


def quadratic(seed, n=6, size=1.0):
    """``H`` with eigenvalues over four orders, a gradient, and an update that somebody has made."""
    torch.manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64))
    h = q @ torch.diag(torch.logspace(-2, 2, n, dtype=torch.float64)) @ q.mT
    g = torch.randn(n, dtype=torch.float64)
    update = -size * torch.sign(g) * torch.rand(n, dtype=torch.float64)
    return h, g, update


def model_at(h, g, s):
    return float(g @ s + s @ h @ s / 2)


def smallest(h, g, u, most):
    """The best ``b`` of ``u + b d`` with ``0 <= b`` and ``|s| <= most |u|``: the end of the leg by
    bisection, and the smallest value of the model before it by thirds."""
    d = -torch.linalg.solve(h, g)
    inside = lambda b: float((u + b * d).norm()) <= most * float(u.norm())  # noqa: E731
    low, high = 0.0, 2.0
    if not inside(high):
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if inside(middle) else (low, middle)
        high = low
    a, b = 0.0, high
    for _ in range(300):
        first, second = a + (b - a) / 3, b - (b - a) / 3
        if model_at(h, g, u + first * d) < model_at(h, g, u + second * d):
            b = second
        else:
            a = first
    return (a + b) / 2, d


def legs_of(g, u, d):
    one = torch.ones(1, dtype=torch.float64)
    return Legs(
        -(g @ u) * one,
        -(g @ d) * one,
        *(
            (x @ y) * one[:, None]
            for x, y in (
                (u, u),
                (u, d),
                (d, d),
            )
        ),
    )


@pytest.mark.parametrize("size", [1e-4, 1e-2, 1.0, 10.0, 1e4])
@pytest.mark.parametrize("most", [1.0, 1.5, 2.0, 10.0])
def test_the_second_leg_ends_where_the_model_is_smallest(most, size):
    ends = set()
    for seed in range(8):
        h, g, u = quadratic(seed, size=size)
        expected, d = smallest(h, g, u, most)
        b = float(Dogleg(most).second_leg(legs_of(g, u, d)))
        s = u + b * d
        # A parabola is flat at its end: its value says more than where that is.
        best = model_at(h, g, u + expected * d)
        assert model_at(h, g, s) <= best + 1e-9 * abs(best)
        assert b == pytest.approx(expected, rel=1e-5, abs=1e-7)
        assert float(s.norm()) <= most * float(u.norm()) * (1 + 1e-12)
        assert float(g @ s) <= float(g @ u) * (1 - 1e-12)
        edge = expected_edge(u, d, most)
        ends.add("update" if b == 0 else "model" if b < 0.999 * edge else "ball")
    if size == 1e-4:
        assert ends == ({"update", "ball"} if most == 1 else {"ball"})
    if size == 1e4:
        assert ends == {"update"}
    if (size, most) == (10.0, 10.0):
        assert "model" in ends


def expected_edge(u, d, most):
    low, high = 0.0, 1e9
    for _ in range(300):
        middle = (low + high) / 2
        inside = float((u + middle * d).norm()) <= most * float(u.norm())
        low, high = (middle, high) if inside else (low, middle)
    return low


def test_an_update_that_goes_uphill_is_not_followed_further_than_the_ball():
    h, g, u = quadratic(0, size=1e-3)
    d = -torch.linalg.solve(h, g)
    for away in (-u, -d / d.norm() * 1e-3):
        b = float(Dogleg().second_leg(legs_of(g, away, d)))
        assert float((away + b * d).norm()) == pytest.approx(2 * float(away.norm()))
        assert float(g @ (away + b * d)) < float(g @ away)


def test_legs_that_are_nothing_move_nothing():
    zero = torch.zeros(3, dtype=torch.float64)
    g = torch.ones(3, dtype=torch.float64)
    for u, d, gradient in ((zero, -g, g), (-g, zero, zero), (zero, zero, zero)):
        assert float(Dogleg().second_leg(legs_of(gradient, u, d))) == 0
    bad = torch.full((3,), math.nan, dtype=torch.float64)
    assert float(Dogleg().second_leg(legs_of(g, -g, bad))) == 0
    assert float(Dogleg().second_leg(legs_of(g, bad, -g))) == 0


def test_every_rate_of_a_layer_has_a_ball():
    """The leg ends at the first of them; one that is not there is at nothing."""
    h, g, u = quadratic(1, size=1e-4)
    d = -torch.linalg.solve(h, g)
    some = [slice(0, 2), slice(2, 6)]
    cut = [torch.stack([(x[s] @ y[s]) for s in some])[None] for x, y in ((u, u), (u, d), (d, d))]
    legs = legs_of(g, u, d)
    b = float(Dogleg().second_leg(Legs(*legs[:2], *cut)))
    edges = [expected_edge(u[s], d[s], 2.0) for s in some]
    assert b == pytest.approx(min(edges))
    padded = [torch.cat([x, torch.zeros(1, 1, dtype=x.dtype)], 1) for x in legs[2:]]
    alone = float(Dogleg().second_leg(legs))
    assert float(Dogleg().second_leg(Legs(*legs[:2], *padded))) == alone


@pytest.mark.parametrize("most", [0.5, -1.0, math.inf, "2"])
def test_most_is_at_least_one(most):
    with pytest.raises(SettingError, match=r"most .*at least 1"):
        Dogleg(most)


# The step of a model.


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def loss_of(model, seed, n=12):
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    x = torch.randn(n, 5, generator=generator).to(dtype)
    return F.cross_entropy(model(x), torch.randint(3, (n,), generator=generator))


OPTIMIZERS = {
    "AdamW": lambda ps, lr=0.01: AdamW(ps, lr=lr, weight_decay=0.1),
    "Adam with L2": lambda ps, lr=0.01: Adam(ps, lr=lr, weight_decay=0.1),
    "fused": lambda ps, lr=0.01: AdamW(ps, lr=lr, fused=True),
    "SGD": lambda ps, lr=0.05: SGD(ps, lr=lr),
    "momentum": lambda ps, lr=0.05: SGD(ps, lr=lr, momentum=0.9, weight_decay=0.01),
    "dampened": lambda ps, lr=0.05: SGD(ps, lr=lr, momentum=0.9, dampening=0.5),
    "Adadelta": lambda ps, lr=1.0: Adadelta(ps, lr=lr),
}
every = pytest.mark.parametrize("name", OPTIMIZERS)


def attached(name="AdamW", model=None, lr=None, **settings):
    model = model or network()
    rate = {} if lr is None else {"lr": lr}
    optimizer = OPTIMIZERS[name](model.parameters(), **rate)
    kfac = KFAC(model, optimizer, **{"length": Dogleg(), **OFTEN, **settings}).attach()
    return model, optimizer, kfac


def trained(model, optimizer, steps, loss=loss_of):
    for seed in steps:
        optimizer.zero_grad()
        loss(model, seed).backward()
        optimizer.step()
    return model


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def matrix(block, read):
    found = torch.zeros(block.shape, dtype=torch.float64)
    block.layers[0].load(found, read)
    return found


def plain_mean(name, optimizer, p):
    """Gradients averaged as the optimizer does it, from what it keeps."""
    state = optimizer.state[p]
    if name in ("AdamW", "Adam with L2", "fused"):
        return state["exp_avg"] / (1 - 0.9 ** float(state["step"]))
    if name in ("momentum", "dampened"):
        return state["momentum_buffer"] * 0.1 / (0.5 if name == "dampened" else 1.0)
    return p.grad


@every
@pytest.mark.parametrize(
    "settings",
    [
        {"structure": Full()},
        {},
        {"inverse": Cholesky()},
        {"damping": Relative(0.1)},
        {"damping": 10.0},
        {"structure": natgrad.EKFAC(), "length": Dogleg(1.3)},
        {"geometry": natgrad.geometry.Euclidean(factored=True)},
    ],
    ids=repr,
)
def test_a_step_is_that_of_a_dense_solve(name, settings):
    """Beside the optimizer alone, in the same state and on the same gradients."""
    model, optimizer, kfac = attached(name, **settings)
    most, moved = kfac.team.motion.length.most, set()
    for seed in range(5):
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        twin, alone = copy.deepcopy((model, [p.grad for p in model.parameters()]))
        alone_optimizer = OPTIMIZERS[name](twin.parameters())
        state = optimizer.state_dict()
        state.pop("kfac")
        alone_optimizer.load_state_dict(copy.deepcopy(state))
        for p, gradient in zip(twin.parameters(), alone, strict=True):
            p.grad = gradient
        before = dict(zip(model.parameters(), copy.deepcopy(list(model.parameters())), strict=True))
        mine = dict(zip(model.parameters(), twin.parameters(), strict=True))
        alone_optimizer.step()
        damping = kfac.settings.at(kfac.steps)
        optimizer.step()
        updates = {p: (mine[p] - before[p]).detach() for p in mine}
        taken = {p: (p - before[p]).detach() for p in mine}
        means = {p: plain_mean(name, alone_optimizer, mine[p]) for p in mine}
        legs = [read.__getitem__ for read in (updates, taken, means)]
        for block in kfac.blocks:
            u, s, g = (matrix(block, read).flatten() for read in legs)
            eye = torch.eye(len(u), dtype=torch.float64)
            decomposed, own = block.decomposed(), damping.damping_of(block)
            columns = [decomposed.multiply(e.view(block.shape), own).flatten() for e in eye]
            if "geometry" in settings:  # each factor is damped by itself
                power = natgrad.geometry.Euclidean(factored=True)
                out = torch.zeros(block.shape, dtype=torch.float64)
                columns = []
                for e in eye:
                    power.step(decomposed, e.view(block.shape), {}, own, out)
                    columns.append(out.flatten().clone())
                columns = list(torch.linalg.inv(torch.stack(columns)))
            h = torch.stack(columns)
            b, d = smallest((h + h.mT) / 2, g, u, most)
            torch.testing.assert_close(s, u + b * d, rtol=1e-5, atol=1e-8)
            moved.add(b > 0)
    assert True in moved


@every
def test_the_optimizer_keeps_what_it_would_keep_alone(name):
    """Bit by bit, and gradients are left as they came."""
    model, optimizer, _ = attached(name)
    trained(model, optimizer, range(3))
    optimizer.zero_grad()
    loss_of(model, 7).backward()
    twin = copy.deepcopy(model)
    alone = OPTIMIZERS[name](twin.parameters())
    state = copy.deepcopy(optimizer.state_dict())
    state.pop("kfac")
    alone.load_state_dict(state)
    gradients = [p.grad for p in model.parameters()]
    kept = [gradient.clone() for gradient in gradients]
    for p, gradient in zip(twin.parameters(), kept, strict=True):
        p.grad = gradient.clone()
    optimizer.step()
    alone.step()
    for p, gradient, copied in zip(model.parameters(), gradients, kept, strict=True):
        assert p.grad is gradient
        assert torch.equal(gradient, copied)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        mine, other = optimizer.state[p], alone.state[q]
        assert mine.keys() == other.keys()
        assert all(
            x is y is None or torch.equal(x, y)
            for x, y in zip(mine.values(), other.values(), strict=True)
        )
    assert not torch.equal(flat(model), flat(twin))


@every
def test_steps_follow_a_schedule(name):
    """Where the ball ends them they are as long as the rate; a rate of 0 moves nothing."""
    found = {}
    for factor in (1e-4, 2e-4, 0.0):
        model, optimizer, _ = attached(name)
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor
        before = flat(model)
        trained(model, optimizer, [3])
        found[factor] = flat(model) - before
    assert not found[0.0].any()
    torch.testing.assert_close(2 * found[1e-4], found[2e-4], rtol=1e-6, atol=1e-13)


def test_no_layer_is_longer_than_it_may_be_and_all_of_them_gain():
    model, optimizer, kfac = attached(length=Dogleg(3.0), lr=1e-4)
    twin = copy.deepcopy((model, optimizer))[0]
    before = {p: p.detach().clone() for p in model.parameters()}
    trained(model, optimizer, [0])
    kfac.detach()
    plain = OPTIMIZERS["AdamW"](twin.parameters(), lr=1e-4)
    trained(twin, plain, [0])
    pairs = dict(zip(model.parameters(), twin.parameters(), strict=True))
    for block in kfac.blocks:
        s = matrix(block, lambda p: (p - before[p]).detach())
        u = matrix(block, lambda p: (pairs[p] - before[p]).detach())
        g = matrix(block, lambda p: p.grad)
        assert float(s.norm()) == pytest.approx(3 * float(u.norm()), rel=1e-6)
        assert float((g * s).sum()) < float((g * u).sum()) < 0
    assert kfac.blending.added.keys() == {block.name for block in kfac.blocks}
    assert all(b > 0 for b in kfac.blending.added.values())


def test_a_curvature_that_leaves_nothing_to_gain_leaves_the_optimizer_alone():
    """The whole natural gradient, divided by a huge damping, is shorter than the update."""
    model, optimizer, _ = attached(damping=1e6)
    twin = network()
    alone = OPTIMIZERS["AdamW"](twin.parameters())
    trained(model, optimizer, range(4))
    assert torch.equal(flat(model), flat(trained(twin, alone, range(4))))


def test_the_scale_of_the_loss_does_not_matter():
    """It is found, and Adam's steps do not depend on it, up to the ``eps`` that it adds."""
    found = []
    for factor in (1.0, 1000.0, 12.0):
        model = network()
        optimizer = AdamW(model.parameters(), lr=1e-3, eps=1e-30)
        loss = {"loss": SumLoss()} if factor == 12.0 else {}
        KFAC(model, optimizer, length=Dogleg(), **OFTEN, **loss).attach()
        trained(model, optimizer, range(4), lambda m, seed, f=factor: f * loss_of(m, seed))
        found.append(flat(model))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found[0], found[2], rtol=1e-9, atol=1e-12)


def test_groups_with_rates_of_their_own():
    """A parameter whose rate is 0 does not move, nor is one taken further than its own rate goes;
    a block with such a parameter stays as the optimizer has moved it."""
    model = network()
    first, norm, last = model[0], model[1], model[3]
    groups = [
        {"params": [first.weight, first.bias], "lr": 1e-5},
        {"params": [norm.weight, norm.bias], "lr": 0.0},
        {"params": [last.weight], "lr": 1e-3},
        {"params": [last.bias], "lr": 1e-4},
    ]
    optimizer = AdamW(groups, weight_decay=0.0)
    KFAC(model, optimizer, length=Dogleg(), **OFTEN).attach()
    twin = network()
    own = dict(zip(model.parameters(), twin.parameters(), strict=True))
    alone = AdamW([{**g, "params": [own[p] for p in g["params"]]} for g in groups], weight_decay=0)
    before = [p.detach().clone() for p in model.parameters()]
    trained(model, optimizer, [0])
    trained(twin, alone, [0])
    moved = [
        float((p - b).detach().norm()) for p, b in zip(model.parameters(), before, strict=True)
    ]
    plain = [float((p - b).detach().norm()) for p, b in zip(twin.parameters(), before, strict=True)]
    assert moved[2] == moved[3] == 0
    both = math.hypot(*moved[:2]) / math.hypot(*plain[:2])
    assert both == pytest.approx(2, rel=1e-5)
    ratios = [m / p for m, p in zip(moved[4:], plain[4:], strict=True)]
    assert max(ratios) == pytest.approx(2, rel=1e-5)
    assert min(ratios) > 1


def test_one_rate_of_0_holds_its_block():
    model = network()
    last = model[3]
    rest = [p for p in model.parameters() if p is not last.bias]
    optimizer = AdamW([{"params": rest}, {"params": [last.bias], "lr": 0.0}], lr=1e-3)
    KFAC(model, optimizer, length=Dogleg(), **OFTEN).attach()
    twin = network()
    alone = AdamW([{"params": [p for p in twin.parameters() if p is not twin[3].bias]}], lr=1e-3)
    trained(model, optimizer, [0])
    trained(twin, alone, [0])
    assert torch.equal(last.weight, twin[3].weight)
    assert torch.equal(last.bias, twin[3].bias)
    assert not torch.equal(model[0].weight, twin[0].weight)


def test_frozen_and_uncovered_parameters_are_the_optimizers():
    model = network()
    model[0].requires_grad_(False)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    KFAC(model, optimizer, length=Dogleg(), exclude=["1"], **OFTEN).attach()
    twin = network()
    twin[0].requires_grad_(False)
    alone = AdamW([p for p in twin.parameters() if p.requires_grad], lr=1e-3)
    trained(model, optimizer, [0])
    trained(twin, alone, [0])
    for index, same in ((0, True), (1, True), (3, False)):
        assert torch.equal(model[index].weight, twin[index].weight) is same


def test_parameters_that_another_optimizer_moves_are_left_to_it():
    """They have no update here, and so no ball."""
    model = network()
    optimizer = AdamW(model[3].parameters(), lr=1e-3)
    KFAC(model, optimizer, length=Dogleg(), **OFTEN).attach()
    before = model[0].weight.detach().clone()
    trained(model, optimizer, [0, 1])
    assert torch.equal(model[0].weight, before)


def test_a_closure_accumulation_and_a_scaler_are_the_same_steps():
    found = []
    for way in ("plain", "closure", "accumulated", "scaled", "fused and scaled"):
        model, optimizer, kfac = attached("fused" if "fused" in way else "AdamW")
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        for seed in range(3):
            optimizer.zero_grad()
            if way == "plain":
                loss_of(model, seed, 8).backward()
                optimizer.step()
            elif way == "closure":

                def closure(seed=seed, model=model, optimizer=optimizer):
                    optimizer.zero_grad()
                    loss = loss_of(model, seed, 8)
                    loss.backward()
                    return loss

                assert optimizer.step(closure).item() > 0
            elif way == "accumulated":
                generator = torch.Generator().manual_seed(seed)
                x = torch.randn(8, 5, generator=generator).double()
                y = torch.randint(3, (8,), generator=generator)
                for rows in (slice(0, 4), slice(4, 8)):
                    (F.cross_entropy(model(x[rows]), y[rows]) / 2).backward()
                optimizer.step()
            else:
                scaler.scale(loss_of(model, seed, 8)).backward()
                scaler.step(optimizer)
                scaler.update()
        assert kfac.steps == 3
        found.append(flat(model))
    for way in found[1:4]:
        torch.testing.assert_close(found[0], way, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_moves_nothing(fused):
    model, optimizer, kfac = attached("fused" if fused else "AdamW")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    trained(model, optimizer, range(2))
    before = flat(model)
    optimizer.zero_grad()
    (scaler.scale(loss_of(model, 5)) * math.inf).backward()
    scaler.step(optimizer)
    assert torch.equal(flat(model), before)
    assert kfac.steps == 2


def test_gradients_that_are_not_finite_add_nothing():
    """To what the optimizer makes of them by itself, here nothing in the layer that is finite."""
    model, optimizer, kfac = attached("SGD", lr=1e-3)
    trained(model, optimizer, [0])
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    before = model[3].weight.detach().clone()
    plain = model[3].weight.grad.clone()
    model[0].weight.grad[0, 0] = math.inf
    optimizer.step()
    torch.testing.assert_close(model[3].weight.detach(), before - 1e-3 * plain)
    assert kfac.preconditioning.zeroed == 1


def test_a_state_goes_on_and_so_does_a_copy():
    whole, optimizer, kfac = attached()
    trained(whole, optimizer, range(3))
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    copied = copy.deepcopy((whole, optimizer, kfac))
    expected = flat(trained(whole, optimizer, range(3, 6)))
    model, optimizer, kfac = attached()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert torch.equal(flat(trained(model, optimizer, range(3, 6))), expected)
    assert kfac.steps == 6
    assert torch.equal(flat(trained(*copied[:2], range(3, 6))), expected)


@pytest.mark.parametrize("often", [1, 2])
def test_a_layer_that_is_unfrozen_joins(often):
    """In its first step, or at the end of one without an update, whose own legs are not lost."""
    model = network()
    model[0].requires_grad_(False)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    settings = {"update_every": often, "refresh_every": often, "length": Dogleg()}
    kfac = KFAC(model, optimizer, **settings).attach()
    trained(model, optimizer, range(3))
    assert "0" not in kfac.blending.added
    model[0].requires_grad_(True)
    for step in range(3, 6):
        trained(model, optimizer, [step])
        assert kfac.blending.added["3"] > 0
    assert kfac.blending.added["0"] > 0


class Beside(nn.Sequential):
    """Its layers see the same input, and their outputs lie beside each other."""

    def forward(self, x):
        return torch.cat([part(x) for part in self], 1)


def test_matrices_that_share_a_weight_have_a_leg_each():
    """Query, key and value: each as one of its own, which has the same gradient."""
    found = []
    for fused in (True, False):
        torch.manual_seed(0)
        weight = torch.randn(6, 5, dtype=torch.float64)
        x, y = torch.randn(9, 5, dtype=torch.float64), torch.randn(9, 6, dtype=torch.float64)
        if fused:
            model = nn.Sequential(nn.Linear(5, 6, bias=False)).double()
            model[0].weight.data.copy_(weight)
        else:
            model = Beside(*(nn.Linear(5, 2, bias=False).double() for _ in range(3)))
            for part, rows in zip(model, weight.split(2), strict=True):
                part.weight.data.copy_(rows)
        optimizer = AdamW(model.parameters(), lr=1e-3)
        KFAC(
            model, optimizer, length=Dogleg(), split={"0": (2, 2, 2)} if fused else None, **OFTEN
        ).attach()
        for step in range(3):
            optimizer.zero_grad()
            out = model(x)
            F.cross_entropy(out * (step + 1), y.argmax(1)).backward()
            optimizer.step()
        found.append(torch.cat([p.detach() for p in model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


def test_slices_of_a_wide_layer_are_the_whole(monkeypatch):
    found = []
    for whole in (1 << 23, 10):
        monkeypatch.setattr(slices, "WHOLE", whole)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(30, 4), nn.Tanh(), nn.Linear(4, 30)).double()
        _, optimizer, kfac = attached(model=model, structure=Kronecker(gradient_block=1))
        for seed in range(3):
            torch.manual_seed(seed)
            x, y = torch.randint(30, (2, 16))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        kinds = {type(stack).__name__ for stack in kfac.preconditioning.stacks}
        assert ("SlicedStack" in kinds) is (whole == 10)
        found.append(flat(model))
    torch.testing.assert_close(*found)


def test_one_layer_takes_few_copies_of_its_weights(monkeypatch):
    """Nothing of a step is kept after it."""
    model, optimizer, kfac = attached()
    trained(model, optimizer, range(2))
    assert kfac.blending.waiting is None
    optimizer.zero_grad()
    loss_of(model, 3).backward()
    seen = []
    after = kfac.blending.after
    monkeypatch.setattr(
        kfac.blending, "after", lambda o: (seen.append(kfac.blending.waiting), after(o))
    )
    optimizer.step()
    assert sum(t.numel() for t in seen[0][1].values()) == flat(model).numel()
    assert kfac.blending.waiting is None


# What is refused.


def test_what_does_not_go_together_is_refused():
    model = network()
    optimizer = AdamW(model.parameters())
    for settings, sentence in (
        ({"geometry": natgrad.Spectral()}, r"minimum of the quadratic model, which Spectral"),
        ({"geometry": natgrad.geometry.Euclidean(0.5)}, r"Euclidean\(power=0.5.* does not"),
        ({"momentum": 0.9}, r"momentum=0.9 is one more: leave it out"),
        ({"damping": LevenbergMarquardt()}, r"compares the loss with what was predicted before"),
    ):
        with pytest.raises(SettingError, match=sentence):
            KFAC(model, optimizer, length=Dogleg(), **settings)
    with pytest.raises(SettingError, match=r"NaturalMuon is one itself: pass natgrad.Rms"):
        NaturalMuon(model, length=Dogleg())


def test_a_step_that_is_not_attached_is_refused():
    model = network()
    optimizer = AdamW(model.parameters())
    kfac = KFAC(model, optimizer, length=Dogleg())
    loss_of(model, 0).backward()
    with pytest.raises(SettingError, match=r"after optimizer.step\(\), too.*\.attach\(\)"):
        kfac.step()


def test_several_optimizers_are_refused():
    model = network()
    both = [AdamW(model[0].parameters()), SGD(model[3].parameters(), lr=0.1)]
    with pytest.raises(SettingError, match=r"one optimizer, and there are AdamW and SGD"):
        KFAC(model, both, length=Dogleg()).attach()
    kfac = KFAC(model, both[0], length=Dogleg()).attach()
    with pytest.raises(SettingError, match=r"one optimizer, and there are AdamW and SGD"):
        kfac.optimizer = both


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_refused(dtype):
    model = network(dtype)
    optimizer = AdamW(model.parameters())
    with pytest.raises(SettingError, match=rf"which are {dtype} and round it away"):
        KFAC(model, optimizer, length=Dogleg()).attach()


class Keeper(Optimizer):
    """Steps weights that it keeps in float64, and rounds them."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-4})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                kept = self.state[p].setdefault("main", p.double().clone())
                kept -= group["lr"] * p.grad
                p.copy_(kept)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (Keeper, r"Keeper keeps a copy of the weights \('main'\)"),
        (lambda ps: torch.optim.ASGD(ps, lr=1e-4), r"ASGD keeps a copy of the weights \('ax'\)"),
    ],
    ids=["rounded", "averaged"],
)
def test_optimizers_that_keep_weights_are_refused_by_name(make, sentence):
    model = network(torch.float32)
    optimizer = make(model.parameters())
    KFAC(model, optimizer, length=Dogleg()).attach()
    with pytest.raises(SettingError, match=sentence):
        trained(model, optimizer, [0])


def test_a_gradient_that_is_the_weight_is_no_copy_of_it():
    model, optimizer, _ = attached("dampened", lr=1e-4)
    optimizer.zero_grad()
    loss_of(model, 0).backward()
    for p in model.parameters():
        p.grad.copy_(p.detach())
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_those_of_torch_are_not(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rate in (1e-7, 1e-3):
            trained(*attached(name, lr=rate)[:2], range(2))
