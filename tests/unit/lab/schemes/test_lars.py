"""LARS by hand, and the groups of parameters without a layer-wise rate."""

import pytest
import torch
from torch import nn

from natgrad.errors import SettingError
from natgrad.lab.schemes import LARS, parameter_groups


def parameter(*values):
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


def test_two_steps_by_hand():
    """w = [3, 4] of norm 5, g = [0, 10]: λ = 0.1 · 5 / (10 + 0.5 · 5) = 0.04."""
    w = parameter(3.0, 4.0)
    optimizer = LARS([w], lr=0.5, momentum=0.5, weight_decay=0.5, trust=0.1)
    w.grad = torch.tensor([0.0, 10.0], dtype=torch.float64)
    optimizer.step()
    # v = 0.5 · 0.04 · ([0, 10] + 0.5 · [3, 4]) = [0.03, 0.24].
    expected = torch.tensor([2.97, 3.76], dtype=torch.float64)
    torch.testing.assert_close(w.detach(), expected, rtol=1e-14, atol=0)
    w.grad = torch.tensor([8.0, 0.0], dtype=torch.float64)
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.step()
    norm = (2.97**2 + 3.76**2) ** 0.5
    rate = 0.1 * norm / (8 + 0.5 * norm)
    # The new rate does not act on what is in the average.
    v = [
        0.5 * 0.03 + 0.25 * rate * (8 + 0.5 * 2.97),
        0.5 * 0.24 + 0.25 * rate * (0.5 * 3.76),
    ]
    expected = torch.tensor([2.97 - v[0], 3.76 - v[1]], dtype=torch.float64)
    torch.testing.assert_close(w.detach(), expected, rtol=1e-13, atol=0)


def test_each_parameter_has_its_own_rate():
    """A step is of the length lr · trust · ‖w‖, whatever the gradient is."""
    layers = [parameter(3.0, 4.0), parameter(30.0, 40.0)]
    optimizer = LARS(layers, lr=2.0, momentum=0.0, trust=0.01)
    before = [w.detach().clone() for w in layers]
    for w, scale in zip(layers, (1e-6, 1e6), strict=True):
        w.grad = torch.full_like(w, scale)
    optimizer.step()
    steps = [float((w.detach() - b).norm()) for w, b in zip(layers, before, strict=True)]
    assert steps == pytest.approx([0.1, 1.0])
    assert not optimizer.state


@pytest.mark.parametrize(("weight", "gradient"), [(0.0, 2.0), (3.0, 0.0), (0.0, 0.0)])
def test_norms_of_zero_say_nothing(weight, gradient):
    w = parameter(weight)
    w.grad = torch.tensor([gradient], dtype=torch.float64)
    LARS([w], lr=0.5, trust=0.1).step()
    assert w.item() == weight - 0.5 * gradient


def test_without_trust_it_is_sgd():
    found = []
    for make in (
        lambda w: LARS([w], lr=0.1, momentum=0.9, weight_decay=0.01, trust=None),
        lambda w: torch.optim.SGD([w], lr=0.1, momentum=0.9, weight_decay=0.01),
    ):
        w = parameter(1.0, -2.0)
        optimizer = make(w)
        for step in range(5):
            w.grad = w.detach() * (step + 1)
            optimizer.step()
        found.append(w.detach())
    torch.testing.assert_close(*found, rtol=1e-13, atol=0)


def network():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LayerNorm([2, 2]), nn.Linear(4, 2)
    )


def test_groups():
    """Norm layers are apart whatever the shape of their weights is."""
    model = network()
    model[4].weight.requires_grad_(False)
    matrices, plain = parameter_groups(model, weight_decay=0.1)
    assert matrices == {"params": [model[0].weight], "weight_decay": 0.1}
    names = {id(p): name for name, p in model.named_parameters()}
    assert [names[id(p)] for p in plain["params"]] == [
        "0.bias", "1.weight", "1.bias", "3.weight", "3.bias", "4.bias",
    ]  # fmt: skip
    assert (plain["weight_decay"], plain["trust"]) == (0.0, None)
    assert len(parameter_groups(nn.Linear(2, 2, bias=False), 0.1)) == 1


def test_groups_of_tied_weights_have_each_once():
    layer = nn.Linear(3, 3)
    matrices, plain = parameter_groups(nn.Sequential(layer, layer), 0.0)
    assert [len(group["params"]) for group in (matrices, plain)] == [1, 1]


@pytest.mark.parametrize("make", [LARS, torch.optim.SGD, torch.optim.AdamW])
def test_groups_in_an_optimizer(make):
    model = network()
    optimizer = make(parameter_groups(model, 0.1), lr=0.1)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    before = model[0].bias.detach().clone()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    if make is LARS:
        torch.testing.assert_close(model[0].bias.detach(), before - 0.1)


def test_errors():
    w = parameter(1.0)
    with pytest.raises(SettingError) as error:
        LARS([w], lr=-0.1)
    assert str(error.value) == (
        "LARS: 'lr' of parameter group 0 is -0.1 but must be finite and at least 0: pass such a "
        "number."
    )
    with pytest.raises(SettingError, match=r"LARS: 'momentum' of parameter group 1 is 1 but must"):
        LARS([{"params": [w]}, {"params": [parameter(2.0)], "momentum": 1}], lr=0.1)
    with pytest.raises(SettingError, match="LARS: 'weight_decay' of parameter group 0 is -1 but"):
        LARS([w], lr=0.1, weight_decay=-1)
    with pytest.raises(SettingError, match="LARS: 'trust' of parameter group 0 is 0 but must be f"):
        LARS([w], lr=0.1, trust=0)
    with pytest.raises(SettingError, match="weight_decay is -1 but must be finite and at least 0"):
        parameter_groups(nn.Linear(2, 2), -1)
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(SettingError) as error:
        LARS(embedding.parameters(), lr=0.1).step()
    assert str(error.value) == (
        "LARS was given a sparse gradient of shape [5, 2] but needs dense ones: make the embedding "
        "with sparse=False."
    )
