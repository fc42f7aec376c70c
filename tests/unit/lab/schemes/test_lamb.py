"""LAMB by hand, and what both layer-wise optimizers share with torch's."""

import math

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import natgrad
from natgrad.errors import SettingError
from natgrad.lab.schemes import LAMB, LARS, parameter_groups
from training_loops import MLP, often


def parameter(*values):
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


def test_two_steps_by_hand():
    """β = (0.5, 0.75), ε = 1, λ = 0.1, written out in numbers."""
    w = parameter(3.0, 4.0)
    optimizer = LAMB([w], lr=0.1, betas=(0.5, 0.75), eps=1.0, weight_decay=0.1)
    w.grad = torch.tensor([1.0, -2.0], dtype=torch.float64)
    optimizer.step()
    # m̂ = g, v̂ = g²: u = [1/2 + 0.3, -2/3 + 0.4].
    u = [0.8, -2 / 3 + 0.4]
    length = math.hypot(*u)
    one = [3 - 0.1 * 5 / length * u[0], 4 - 0.1 * 5 / length * u[1]]
    torch.testing.assert_close(w.detach(), torch.tensor(one).double(), rtol=1e-6, atol=0)
    assert w.tolist() == pytest.approx(one, rel=1e-13)

    w.grad = torch.tensor([3.0, 0.0], dtype=torch.float64)
    optimizer.step()
    # m = [0.5 · 0.5 + 0.5 · 3, -0.5], over 1 - 0.5²; v = [0.75 · 0.25 + 0.25 · 9, 0.75], over
    # 1 - 0.75².
    m = [1.75 / 0.75, -0.5 / 0.75]
    v = [2.4375 / 0.4375, 0.75 / 0.4375]
    u = [m[i] / (math.sqrt(v[i]) + 1) + 0.1 * one[i] for i in range(2)]
    scale = 0.1 * math.hypot(*one) / math.hypot(*u)
    assert w.tolist() == pytest.approx([one[i] - scale * u[i] for i in range(2)], rel=1e-13)


def test_the_length_of_a_step():
    """lr · trust · φ(‖w‖), whatever the gradient is."""
    for bounds, expected in (((0.0, math.inf), 5.0), ((0.0, 2.0), 2.0), ((10.0, 20.0), 10.0)):
        w = parameter(3.0, 4.0)
        w.grad = torch.tensor([1e-3, 1e3], dtype=torch.float64)
        LAMB([w], lr=0.1, trust=0.5, bounds=bounds).step()
        moved = w.detach() - torch.tensor([3.0, 4.0], dtype=torch.float64)
        assert float(moved.norm()) == pytest.approx(0.1 * 0.5 * expected)


def test_norms_of_zero_say_nothing():
    w = parameter(0.0)
    w.grad = torch.ones_like(w)
    LAMB([w], lr=0.1, eps=1.0).step()
    assert w.item() == pytest.approx(-0.1 * 0.5)
    w = parameter(3.0)
    w.grad = torch.zeros_like(w)
    LAMB([w], lr=0.1).step()
    assert w.item() == 3.0


def test_without_trust_it_is_adamw():
    found = []
    settings = {"betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.01}
    for make in (
        lambda w: LAMB([w], lr=0.1, trust=None, **settings),
        lambda w: torch.optim.AdamW([w], lr=0.1, **settings),
    ):
        w = parameter(1.0, -2.0)
        optimizer = make(w)
        for step in range(5):
            w.grad = w.detach() * (step + 1)
            optimizer.step()
        found.append(w.detach())
    torch.testing.assert_close(*found, rtol=1e-12, atol=0)


OPTIMIZERS = {
    "LARS": lambda groups: LARS(groups, lr=1.0, trust=0.01),
    "LAMB": lambda groups: LAMB(groups, lr=0.01),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
class TestBoth:
    def start(self, make):
        model = MLP.model()
        optimizer = make(parameter_groups(model, 1e-3))
        scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
        return model, optimizer, scheduler, natgrad.KFAC(model, optimizer, **often())

    def run(self, parts, first, last):
        model, optimizer, scheduler, kfac = parts
        losses = []
        for x, y in list(MLP.batches(last))[first:]:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            losses.append(float(loss.detach()))
            kfac.step()
            optimizer.step()
            scheduler.step()
        return losses

    def test_resume_is_bit_identical(self, make, tmp_path):
        whole, first, second = (self.start(make) for _ in range(3))
        self.run(whole, 0, 8)
        self.run(first, 0, 3)
        torch.save([part.state_dict() for part in first], tmp_path / "state.pt")
        states = torch.load(tmp_path / "state.pt", weights_only=True)
        for index in (0, 2, 3, 1):
            second[index].load_state_dict(states[index])
        self.run(second, 3, 8)
        for one, other in zip(whole[0].parameters(), second[0].parameters(), strict=True):
            assert torch.equal(one, other)

    def test_trains(self, make):
        model, x, y = MLP.model(), *MLP.batch(64)
        optimizer = make(parameter_groups(model, 0.0))
        losses = []
        for _ in range(60):
            optimizer.zero_grad()
            losses.append(nn.functional.cross_entropy(model(x), y))
            losses[-1].backward()
            optimizer.step()
        assert losses[-1] < 0.9 * losses[0]

    def test_closure_and_missing_gradients(self, make):
        w, unused = parameter(4.0), parameter(1.0)
        optimizer = make([w, unused])

        def closure():
            optimizer.zero_grad()
            loss = w.square().sum()
            loss.backward()
            return loss

        assert float(optimizer.step(closure).detach()) == 16.0
        assert w.item() < 4.0
        assert unused.item() == 1.0
        assert unused not in optimizer.state

    def test_half_precision(self, make):
        """Norms are summed in float32: these would not fit into float16."""
        w = nn.Parameter(torch.full((1000, 1000), 100.0, dtype=torch.float16))
        w.grad = torch.full_like(w, 100.0)
        make([w]).step()
        torch.testing.assert_close(w.detach(), torch.full_like(w, 99.0))


def test_errors():
    w = parameter(1.0)
    with pytest.raises(SettingError, match="LAMB: 'lr' of parameter group 0 is -1 but must be fin"):
        LAMB([w], lr=-1)
    with pytest.raises(SettingError, match="LAMB: 'eps' of parameter group 0 is -1 but must be f"):
        LAMB([w], eps=-1)
    with pytest.raises(SettingError, match="LAMB: 'trust' of parameter group 0 is -1 but must be"):
        LAMB([w], trust=-1)
    with pytest.raises(SettingError, match=r"LAMB: a beta of parameter group 0 is 1 but must be "):
        LAMB([w], betas=(0.9, 1))
    with pytest.raises(SettingError) as error:
        LAMB([w], bounds=(2, 1))
    assert str(error.value) == (
        "LAMB: 'bounds' of parameter group 0 are (2, 1) but must be two numbers with "
        "0 <= low < high: pass (0, inf) for none."
    )
    with pytest.raises(SettingError, match="LAMB: 'weight_decay' of parameter group 0 is -1 but "):
        LAMB([w], weight_decay=-1)
    w.grad = torch.ones(1, dtype=torch.float64).to_sparse()
    with pytest.raises(SettingError, match=r"LAMB was given a sparse gradient of shape \[1\] but"):
        LAMB([w]).step()
