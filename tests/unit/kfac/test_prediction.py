"""The ratio that moves the damping: an actual change of the loss over the one that a dense
quadratic model predicts."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from natgrad import KFAC, Eigen, Full, MeanLoss, SumLoss
from natgrad.schedules import LevenbergMarquardt

DAMPING = 0.3


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.Linear(3, 2)).double()


def gradients(model, x, y):
    """Of every sample, ``[n, numel]`` for each parameter by its name."""
    found = {name: [] for name, _ in model.named_parameters()}
    for one, target in zip(x, y, strict=True):
        loss = F.cross_entropy(model(one[None]), target[None])
        for name, g in zip(found, torch.autograd.grad(loss, list(model.parameters())), strict=True):
            found[name].append(g.flatten())
    return {name: torch.stack(rows) for name, rows in found.items()}


@pytest.mark.parametrize("rate", [0.02, 0.5])
@pytest.mark.parametrize("loss", [MeanLoss(), SumLoss()], ids=repr)
@pytest.mark.parametrize("excluded", [None, "3"])
def test_the_change_that_a_dense_model_predicts(rate, loss, excluded):
    """``<g, d> + 1/2 <d, (F + damping I) d>`` of the mean loss, with the blocks of ``F`` layer by
    layer; what has no block enters with its gradient alone. ``d`` has weight decay in it."""
    model, x, y = network(), torch.randn(8, 3, dtype=torch.float64), torch.randint(2, (8,))
    rows = gradients(model, x, y)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, weight_decay=0.1)
    rule = LevenbergMarquardt(start=DAMPING, every=2)
    settings = {"structure": Full(), "inverse": Eigen(), "damping": rule, "kl_clip": None}
    more = {} if excluded is None else {"exclude": excluded}
    kfac = KFAC(model, optimizer, loss=loss, update_every=1, refresh_every=1, **settings, **more)
    before = F.cross_entropy(model(x), y, reduction=loss.reduction)
    before.backward()
    old = {name: p.detach().clone() for name, p in model.named_parameters()}
    kfac.step()
    optimizer.step()
    after = F.cross_entropy(model(x), y, reduction=loss.reduction)

    moved = {n: (p.detach() - old[n]).flatten() for n, p in model.named_parameters()}
    predicted = sum(rows[n].mean(0) @ moved[n] for n in moved)
    for layer in ("0", "2", "3"):
        if layer == excluded:
            continue
        own = torch.cat([rows[f"{layer}.{n}"] for n in ("weight", "bias")], 1)
        d = torch.cat([moved[f"{layer}.{n}"] for n in ("weight", "bias")])
        predicted += ((own @ d).square().mean() + DAMPING * d @ d) / 2
    actual = (after - before) / (8 if loss == SumLoss() else 1)
    now = kfac.settings.at(0)
    found = kfac.prediction.ratio(before.item(), after.item(), now)
    assert found == pytest.approx((actual / predicted).item(), rel=1e-9)
    # It is said once.
    assert kfac.prediction.remembered == []
    assert kfac.adapt(before, after) == DAMPING


def test_only_its_own_steps_are_remembered():
    model, x, y = network(), torch.randn(8, 3, dtype=torch.float64), torch.randint(2, (8,))
    rule = LevenbergMarquardt(start=DAMPING, every=2, decay=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    kfac = KFAC(model, optimizer, damping=rule, update_every=1, refresh_every=1, kl_clip=None)
    found = []
    for _ in range(4):
        optimizer.zero_grad()
        before = F.cross_entropy(model(x), y)
        before.backward()
        kfac.step()
        optimizer.step()
        found.append(kfac.adapt(before, before + 1))
    assert found == pytest.approx([4 * DAMPING, 4 * DAMPING, 16 * DAMPING, 16 * DAMPING])
