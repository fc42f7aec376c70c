"""The learning rates that the KL clip reads, and the clip itself."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adam, Muon

from natgrad import KFAC, MeanLoss, SumLoss
from natgrad.errors import SettingError
from natgrad.kfac.clipping import LearningRates, kl_scale


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def grouped(model: nn.Sequential) -> SGD:
    return SGD([{"params": list(model[i].parameters()), "lr": 0.1 * (i + 1)} for i in (0, 2)])


class TestLearningRates:
    def test_a_parameter_put_into_a_group_has_its_rate(self):
        model = net()
        optimizer = SGD(model[0].parameters(), lr=0.1)
        rates = LearningRates([optimizer])
        rates.read()
        assert rates.of(model[2].weight) == 0.0
        before = rates.version
        optimizer.param_groups[0]["params"].append(model[2].weight)
        rates.read()
        assert rates.of(model[2].weight) == 0.1
        assert rates.version > before

    def test_a_parameter_that_takes_the_place_of_another(self):
        model = net()
        optimizer = grouped(model)
        rates = LearningRates([optimizer])
        rates.read()
        new = nn.Parameter(torch.zeros(3))
        optimizer.param_groups[1]["params"][1] = new
        rates.read()
        assert rates.of(new) == pytest.approx(0.3)
        assert rates.of(model[2].bias) == 0.0

    def test_a_parameter_that_moves_to_the_next_group(self):
        model = net()
        optimizer = grouped(model)
        rates = LearningRates([optimizer])
        rates.read()
        first, second = (group["params"] for group in optimizer.param_groups)
        second.insert(0, first.pop())
        rates.read()
        assert rates.of(model[0].bias) == pytest.approx(0.3)

    @pytest.mark.parametrize(
        ("group", "reach"),
        [
            ({}, 0.1),
            ({"momentum": None}, 0.1),  # as some optimizers say that they have none
            ({"momentum": 0.9}, 1.0),
            ({"momentum": 0.9, "nesterov": True}, 1.0),
            ({"momentum": 0.9, "dampening": 0.5}, 0.5),
            ({"momentum": 0.9, "dampening": 0.9}, 0.1),
            ({"momentum": 0.9, "dampening": 1.0}, 0.1),  # the first step is a whole one
            ({"momentum": 1.0}, 100.0),
        ],
        ids=str,
    )
    def test_momentum_goes_on_along_a_gradient(self, group, reach):
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1)
        optimizer.param_groups[0].update(group)
        rates = LearningRates([optimizer])
        rates.read()
        assert rates.of(model[0].weight) == pytest.approx(reach)

    def test_a_momentum_that_changes_is_seen(self):
        model = net()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.5)
        rates = LearningRates([optimizer])
        rates.read()
        before = rates.version
        optimizer.param_groups[0]["momentum"] = 0.9
        rates.read()
        assert rates.of(model[0].weight) == pytest.approx(1.0)
        assert rates.version > before

    @pytest.mark.parametrize("kind", [Adam, Muon], ids=["Adam", "Muon"])
    def test_a_mean_of_gradients_goes_no_further(self, kind):
        model = net()
        rates = LearningRates([kind([model[0].weight], lr=0.1)])
        rates.read()
        assert rates.of(model[0].weight) == pytest.approx(0.1)

    def test_nothing_changes_where_nothing_has_changed(self):
        rates = LearningRates([grouped(net())])
        rates.read()
        version = rates.version
        rates.read()
        assert rates.version == version


class TestAnotherOptimizer:
    def clipped(self, swap: bool) -> list[torch.Tensor]:
        model = net()
        first = SGD(model.parameters(), lr=1e-6)
        second = SGD(model.parameters(), lr=10.0)
        kfac = KFAC(model, first if swap else second, update_every=1, refresh_every=1)
        if swap:
            kfac.optimizer = second
            assert kfac.optimizer is second
        x, y = torch.randn(8, 4).double(), torch.randint(3, (8,))
        F.cross_entropy(model(x), y).backward()
        kfac.step()
        return [p.grad for p in model.parameters()]

    def test_it_is_asked_from_then_on(self):
        torch.manual_seed(1)
        swapped = self.clipped(True)
        torch.manual_seed(1)
        for a, b in zip(swapped, self.clipped(False), strict=True):
            assert torch.equal(a, b)

    def test_one_of_another_model_is_refused(self):
        model = net()
        kfac = KFAC(model, SGD(model.parameters(), lr=0.1))
        with pytest.raises(SettingError, match="has none of the parameters of Sequential"):
            kfac.optimizer = SGD(net().parameters(), lr=0.1)
        with pytest.raises(SettingError, match="pass the optimizer of this very model"):
            KFAC(model, SGD(net().parameters(), lr=0.1))
        KFAC(model, SGD(net().parameters(), lr=0.1), kl_clip=None)

    def test_none_is_refused_where_the_clip_needs_one(self):
        model = net()
        kfac = KFAC(model, SGD(model.parameters(), lr=0.1))
        with pytest.raises(SettingError, match="there is no optimizer to ask"):
            kfac.optimizer = None


def test_a_copy_whose_learning_rate_changes_is_clipped_by_it():
    """A parameter that nobody finds has a rate of 0, and is not clipped at all."""
    model = net()
    optimizer = SGD(model.parameters(), lr=1.0)
    kfac = KFAC(model, optimizer, kl_clip=1e-4, update_every=1, refresh_every=1)
    x, y = torch.randn(8, 4).double(), torch.randint(3, (8,))
    F.cross_entropy(model(x), y).backward()
    kfac.step()
    trainings = [(model, optimizer, kfac), copy.deepcopy((model, optimizer, kfac))]
    for its, rates, preconditioner in trainings:
        rates.param_groups[0]["lr"] = 10.0
        its.zero_grad()
        F.cross_entropy(its(x), y).backward()
        preconditioner.step()
    for a, b in zip(*(its.parameters() for its, *_ in trainings), strict=True):
        assert torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("momentum", [0.0, 0.9], ids=["plain", "momentum"])
def test_steps_along_one_gradient_are_as_long_as_the_clip_allows(momentum):
    """However many of them agree: ``d^T (F + damping) d = kl_clip`` for what moves the weights."""
    torch.manual_seed(1)
    x, y = torch.randn(8, 4).double(), torch.randint(3, (8,))
    moved = {}
    for clip in (None, 1e-4):
        model = net()
        optimizer = SGD(model.parameters(), lr=0.5, momentum=momentum)
        never = {"update_every": 10**6, "refresh_every": 10**6}
        kfac = KFAC(model, optimizer, kl_clip=clip, **never)
        F.cross_entropy(model(x), y).backward()
        plain = [p.grad.clone() for p in model.parameters()]
        for _ in range(1 if clip is None else 200):
            for p, g in zip(model.parameters(), plain, strict=True):
                p.grad = g.clone()
            kfac.step(samples=8)
            natural = [p.grad.clone() for p in model.parameters()]
            before = [p.detach().clone() for p in model.parameters()]
            optimizer.step()
        steps = [p.detach() - q for p, q in zip(model.parameters(), before, strict=True)]
        moved[clip] = natural if clip is None else steps
    u, d = (torch.cat([t.flatten() for t in moved[clip]]) for clip in (None, 1e-4))
    raw = torch.cat([t.flatten() for t in plain])
    torch.testing.assert_close((d.norm() / u.norm()) ** 2 * (u @ raw), torch.tensor(1e-4).double())


def test_the_clip_of_a_sum_is_that_of_the_mean():
    """With ``d = lr grad / N``, the clip is on ``lr^2 <F^-1 grad, grad> / N^2``."""
    found = []
    torch.manual_seed(1)
    x, y = torch.randn(8, 4).double(), torch.randint(3, (8,))
    for loss, reduction in ((MeanLoss(), "mean"), (SumLoss(), "sum")):
        model = net()
        kfac = KFAC(model, SGD(model.parameters(), lr=0.5), loss=loss, kl_clip=1e-4)
        F.cross_entropy(model(x), y, reduction=reduction).backward()
        kfac.step()
        found.append([p.grad for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    model = net()
    free = KFAC(model, kl_clip=None)
    F.cross_entropy(model(x), y).backward()
    free.step()
    assert not torch.allclose(found[0][0], model[0].weight.grad)  # the clip has acted


@pytest.mark.parametrize(
    ("total", "clip", "expected"),
    [(4.0, 1.0, 0.5), (0.25, 1.0, 1.0), (4.0, None, 1.0), (0.0, 1.0, 1.0), (float("nan"), 1.0, 0)],
)
def test_the_factor_of_a_step(total, clip, expected):
    assert float(kl_scale(torch.tensor(total), clip)) == expected
