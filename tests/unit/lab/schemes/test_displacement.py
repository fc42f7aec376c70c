"""Momentum of displacements by hand, and what any wrapper of an optimizer must do."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import natgrad
from natgrad.errors import SettingError
from natgrad.lab.schemes import DisplacementMomentum, LargeBatch, Lookahead, large_batch
from training_loops import MLP, often

RATE = "displacement_momentum"


def parameter(*values):
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


def test_three_steps_by_hand():
    """Eq. 17 with η = 0.5 and m = 0.5: displacements of -1, -1.5, -1.75 under a gradient of 2."""
    w = parameter(10.0)
    optimizer = DisplacementMomentum(torch.optim.SGD([w], lr=0.5), 0.5)
    found = []
    for _ in range(3):
        w.grad = torch.tensor([2.0], dtype=torch.float64)
        optimizer.step()
        found.append(w.item())
    assert found == [9.0, 7.5, 5.75]


def test_rescaling_is_part_of_the_displacement():
    w = parameter(8.0)
    optimizer = DisplacementMomentum(torch.optim.SGD([w], lr=1.0), 0.5)
    w.grad = torch.tensor([2.0], dtype=torch.float64)
    optimizer.step()
    with torch.no_grad():
        w.mul_(0.5)  # to 3, from 6
    optimizer.step()
    assert w.item() == 3 - 2 + 0.5 * (3 - 8)


def test_a_constant_rate_is_the_momentum_of_sgd():
    models = [MLP.model().double() for _ in range(2)]
    wrapped = DisplacementMomentum(torch.optim.SGD(models[0].parameters(), lr=0.1), 0.9)
    plain = torch.optim.SGD(models[1].parameters(), lr=0.1, momentum=0.9)
    for x, y in MLP.batches(10):
        for model, optimizer in zip(models, (wrapped, plain), strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x.double()), y).backward()
            optimizer.step()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("setting", [large_batch(4096), large_batch(131_072)])
def test_coupled_to_a_falling_rate(setting: LargeBatch):
    """Eqs. 15 to 17, written out, with all of the schedulers in place."""
    images = 20 * setting.batch  # 20 steps an epoch
    lr, momentum = setting.lr_schedule(images), setting.momentum_schedule(images)
    w = parameter(1.0, -2.0)
    optimizer = DisplacementMomentum(torch.optim.SGD([w], lr=lr.start), momentum)
    scheduler = LambdaLR(optimizer, lr.factor)
    now = before = w.detach().clone()
    for step in range(200):
        epoch = step / 20
        decay = 1 - max(0.0, epoch - setting.begin) / (setting.end - setting.begin)
        eta = setting.lr * decay**setting.power
        gradient = now * torch.tensor([1.0, 3.0], dtype=torch.float64)
        now, before = (
            now - eta * gradient + setting.momentum / setting.lr * eta * (now - before),
            now,
        )
        w.grad = w.detach() * torch.tensor([1.0, 3.0], dtype=torch.float64)
        optimizer.step()
        assert optimizer.param_groups[0][RATE] == pytest.approx(setting.momentum / setting.lr * eta)
        scheduler.step()
        torch.testing.assert_close(w.detach(), now, rtol=1e-10, atol=1e-13)


def test_groups_have_their_own_momentum():
    one, other = parameter(1.0), parameter(1.0)
    groups = [{"params": [one]}, {"params": [other], RATE: 0.0}]
    optimizer = DisplacementMomentum(torch.optim.SGD(groups, lr=0.1), 0.5)
    for _ in range(2):
        one.grad = other.grad = torch.ones(1, dtype=torch.float64)
        optimizer.step()
    assert one.item() == pytest.approx(1 - 0.1 - 0.1 - 0.05)
    assert other.item() == pytest.approx(0.8)


def test_a_missing_gradient():
    """As in SGD, what is remembered of a parameter waits for its next gradient."""
    w, other = parameter(1.0), parameter(1.0)
    optimizer = DisplacementMomentum(torch.optim.Adam([w, other], lr=0.1), 0.5)
    for grads in ((None, 1.0), (1.0, 1.0), (None, 1.0), (1.0, 1.0)):
        w.grad = None if grads[0] is None else torch.tensor([grads[0]], dtype=torch.float64)
        before = w.item()
        other.grad = torch.ones(1, dtype=torch.float64)
        optimizer.step()
        if w.grad is None:
            assert w.item() == before
    # Adam's own steps are of -0.1 here; the second one gets half of the first.
    assert w.item() == pytest.approx(1 - 0.1 - 0.1 - 0.05)


def test_closure():
    w = parameter(4.0)
    optimizer = DisplacementMomentum(torch.optim.SGD([w], lr=0.25), 0.5)

    def closure():
        optimizer.zero_grad()
        loss = w.square().sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == 16.0
    assert w.item() == 2.0
    assert float(optimizer.step(closure).detach()) == 4.0
    assert w.item() == 2 - 1 + 0.5 * (2 - 4)


def test_lbfgs_within():
    w = parameter(3.0, 4.0)
    optimizer = DisplacementMomentum(torch.optim.LBFGS([w], lr=0.5), 0.1)

    def closure():
        optimizer.zero_grad()
        loss = w.square().sum()
        loss.backward()
        return loss

    for _ in range(10):
        optimizer.step(closure)
    assert float(w.detach().norm()) < 0.1


# What holds for any wrapper.

WRAPPERS = {
    "displacement": lambda inner: DisplacementMomentum(inner, 0.5),
    "lookahead": lambda inner: Lookahead(inner, every=3),
    "both": lambda inner: Lookahead(DisplacementMomentum(inner, 0.5), every=3),
}
INNER = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, weight_decay=1e-3),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
}
wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
inner = pytest.mark.parametrize("make", INNER.values(), ids=INNER)


def start(wrap, make):
    model = MLP.model()
    optimizer = wrap(make(model.parameters()))
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    return model, optimizer, scheduler, natgrad.KFAC(model, optimizer, **often())


def run(parts, steps, seed=0):
    model, optimizer, scheduler, kfac = parts
    for x, y in list(MLP.batches(20))[seed : seed + steps]:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        kfac.step()
        optimizer.step()
        scheduler.step()


@wrapper
@inner
@pytest.mark.parametrize("at", [0, 1, 4, 6])
def test_resume_is_bit_identical(wrap, make, at, tmp_path):
    whole = start(wrap, make)
    run(whole, 9)
    first = start(wrap, make)
    run(first, at)
    torch.save([part.state_dict() for part in first], tmp_path / "state.pt")
    second = start(wrap, make)
    states = torch.load(tmp_path / "state.pt", weights_only=True)
    # The optimizer's state last, as torch asks for: a new scheduler sets learning rates.
    for index in (0, 2, 3, 1):
        second[index].load_state_dict(states[index])
    run(second, 9 - at, at)
    for one, other in zip(whole[0].parameters(), second[0].parameters(), strict=True):
        assert torch.equal(one, other)


@wrapper
@inner
def test_a_copy_goes_on_alike(wrap, make):
    def steps(model, optimizer):
        for x, y in MLP.batches(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    for copied in (copy.deepcopy, lambda parts: pickle.loads(pickle.dumps(parts))):
        model = MLP.model()
        parts = [model, wrap(make(model.parameters()))]
        steps(*parts)
        others = copied(parts)
        assert others[1].param_groups is others[1].optimizer.param_groups
        steps(*parts)
        steps(*others)
        for one, other in zip(parts[0].parameters(), others[0].parameters(), strict=True):
            assert torch.equal(one, other)
            assert one is not other


@wrapper
def test_groups_and_state_are_those_within(wrap):
    w, later = parameter(1.0), parameter(2.0)
    sgd = torch.optim.SGD([w], lr=0.1)
    optimizer = wrap(sgd)
    assert optimizer.param_groups is sgd.param_groups
    optimizer.add_param_group({"params": [later], "lr": 0.2})
    assert [group["lr"] for group in sgd.param_groups] == [0.1, 0.2]
    w.grad, later.grad = torch.ones_like(w), torch.ones_like(w)
    optimizer.step()
    assert w.item() == pytest.approx(0.9)
    assert later.item() == pytest.approx(1.8)
    assert optimizer.state is sgd.state
    sgd.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups is sgd.param_groups
    optimizer.zero_grad()
    assert w.grad is None


@wrapper
def test_a_state_from_before_the_wrapper(wrap):
    w = parameter(1.0)
    sgd = torch.optim.SGD([w], lr=0.1)
    state = sgd.state_dict()
    optimizer = wrap(sgd)
    optimizer.load_state_dict(state)
    w.grad = torch.ones_like(w)
    optimizer.step()
    assert w.item() == pytest.approx(0.9)


@wrapper
def test_step_hooks_and_scaler(wrap):
    w = parameter(1.0)
    optimizer, seen = wrap(torch.optim.SGD([w], lr=0.1)), []
    optimizer.register_step_post_hook(lambda *_: seen.append(w.item()))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(w.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert seen == [pytest.approx(0.9)]
    w.grad = torch.full_like(w, torch.inf)
    scaler.step(optimizer)
    assert w.item() == pytest.approx(0.9)


def test_errors():
    with pytest.raises(SettingError) as error:
        DisplacementMomentum([parameter(1.0)], 0.9)
    assert str(error.value) == (
        "optimizer is a list but must be a torch.optim.Optimizer: pass the one that "
        "DisplacementMomentum goes around."
    )
    w = parameter(1.0)
    with pytest.raises(SettingError) as error:
        DisplacementMomentum(torch.optim.SGD([w], lr=0.1), 1.0)
    assert str(error.value) == (
        "DisplacementMomentum.momentum is 1.0 but must be in [0, 1): pass such a number, or "
        "natgrad.schedules.CoupledMomentum(start, lr)."
    )
    with pytest.raises(SettingError) as error:
        DisplacementMomentum(torch.optim.SGD([w], lr=0.1, momentum=0.9), 0.9)
    assert str(error.value) == (
        "Parameter group 0 of SGD has a momentum of 0.9 but must have none, as "
        "DisplacementMomentum adds one: make the optimizer with momentum=0."
    )
    with pytest.raises(SettingError) as error:
        DisplacementMomentum(torch.optim.SGD([{"params": [w], RATE: 2}], lr=0.1), 0.9)
    assert str(error.value) == (
        "'displacement_momentum' of parameter group 0 is 2 but must be in [0, 1): pass such a "
        "number."
    )
    coupled = natgrad.schedules.CoupledMomentum(0.9, lambda step: 0.1)
    with pytest.raises(SettingError) as error:
        DisplacementMomentum(torch.optim.SGD([w], lr=0.2), coupled)
    assert str(error.value) == (
        "The momentum of parameter group 0 is 1.8 for its lr 0.2 but must be in [0, 1): give the "
        "group a learning rate in step with CoupledMomentum.lr, which starts at 0.1."
    )
