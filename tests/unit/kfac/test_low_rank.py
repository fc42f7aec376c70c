"""Thin products in place of gradients: exact where they stand for them, and unused where not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import natgrad
from natgrad import KFAC
from natgrad.kfac import low_rank
from training_loops import MLP, NETS, assert_close, gradients, hooks, often


@pytest.fixture
def used(monkeypatch):
    """Every linear layer is wide enough here; counts how often a thin product was used."""
    counter = {"times": 0}

    class Counted(low_rank.OuterProduct):
        def __init__(self, *args):
            counter["times"] += 1
            super().__init__(*args)

    monkeypatch.setattr(low_rank, "_WIDE", 0)
    monkeypatch.setattr(low_rank, "_pays", lambda k, block: True)
    monkeypatch.setattr(low_rank, "OuterProduct", Counted)
    return counter


def plain(model, x, y, optimizer):
    F.cross_entropy(model(x), y).backward()


def accumulated(model, x, y, optimizer):
    for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
        (F.cross_entropy(model(a), b) / 2).backward()


def clipped(model, x, y, optimizer):
    plain(model, x, y, optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def decayed(model, x, y, optimizer):
    plain(model, x, y, optimizer)
    for p in model.parameters():
        p.grad.add_(p.detach(), alpha=0.1)


def regularised(model, x, y, optimizer):
    (F.cross_entropy(model(x), y) + sum(p.square().sum() for p in model.parameters())).backward()


def hooked(model, x, y, optimizer):
    out = model(x)
    out.register_hook(lambda g: 3 * g)
    F.cross_entropy(out, y).backward()


def twice(model, x, y, optimizer):
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    loss.backward()


def recomputed(model, x, y, optimizer):
    out = checkpoint(model, x.clone().requires_grad_(), use_reentrant=True)
    F.cross_entropy(out, y).backward()


def evaluated(model, x, y, optimizer):
    loss = F.cross_entropy(model(x), y)
    model(2 * x)
    loss.backward()


def frozen_bias(model, x, y, optimizer):
    plain(model, x, y, optimizer)
    for p in model.parameters():
        if p.ndim == 1:
            p.grad.zero_()


# How many layers of the two networks have a thin gradient. A layer that is called twice has a sum
# of two products; a hook that changes the gradient of an output makes that of its layer another.
WAYS = {
    plain: (3, 2),
    evaluated: (3, 2),
    hooked: (2, 1),
    accumulated: (0, 0),
    clipped: (0, 0),
    decayed: (0, 0),
    regularised: (0, 0),
    twice: (0, 0),
    recomputed: (0, 0),
    frozen_bias: (0, 0),
}


@pytest.mark.parametrize("net", ["mlp", "twice"])
@pytest.mark.parametrize("kl_clip", [None, 1e-5])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_gradient_is_the_same(way, kl_clip, net, used):
    found = []
    x, y = NETS[net].batch()
    for enabled in (False, True):
        model = NETS[net].model()
        optimizer = SGD(model.parameters(), lr=0.1)
        kfac = KFAC(model, optimizer, **often(inverse=natgrad.Cholesky(), kl_clip=kl_clip))
        if not enabled:
            kfac.low_rank.detach()
        for _ in range(2):
            optimizer.zero_grad()
            way(model, x, y, optimizer)
            kfac.step()
        found.append(gradients(model))
        assert used["times"] == (2 * WAYS[way][net == "twice"] if enabled else 0)
    assert_close(found[1], found[0], 1e-4)


def test_loss_scaling(used):
    found = []
    for enabled in (False, True):
        model = MLP.model()
        optimizer = SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=enabled)
        kfac = KFAC(model, optimizer, **often(inverse=natgrad.Cholesky(), scaler=scaler))
        for x, y in MLP.batches(2):
            optimizer.zero_grad()
            scaler.scale(F.cross_entropy(model(x), y)).backward()
            kfac.step()
            scaler.step(optimizer)
            scaler.update()
        found.append(gradients(model))
    assert used["times"] == 12
    assert_close(found[1], found[0], 1e-4)


def test_bad_numbers(used):
    model = MLP.model()
    optimizer = SGD(model.parameters(), lr=0.1)
    kfac = KFAC(model, optimizer, **often(inverse=natgrad.Cholesky()))
    x, y = MLP.batch()
    for factor in (1.0, float("nan"), float("inf")):
        optimizer.zero_grad()
        (factor * F.cross_entropy(model(x), y)).backward()
        kfac.step()
    assert kfac.preconditioning.zeroed == 2
    assert not any(p.grad.any() for p in model.parameters())


def test_hooks_are_taken_off(used):
    model = MLP.model()
    kfac = KFAC(model, kl_clip=None, inverse=natgrad.Cholesky(), update_every=5)
    assert hooks(model) > 0
    kfac.detach()
    assert hooks(model) == 0


class Gated(nn.Linear):
    """Half of what it computes is a gate of the other half, as in feed-forward layers."""

    def forward(self, x):
        value, gate = super().forward(x).chunk(2, -1)
        return value * gate.sigmoid()


def test_a_module_with_something_around_its_product_has_no_thin_gradient(used):
    """What comes out of it is not what its weight has made."""
    torch.manual_seed(0)
    model = nn.Sequential(Gated(4, 6), nn.Linear(3, 3))
    kfac = KFAC(model, kl_clip=None, **often(inverse=natgrad.Cholesky()))
    F.cross_entropy(model(torch.randn(5, 4)), torch.arange(5) % 3).backward()
    kfac.step()
    assert [block.name for block in kfac.blocks] == ["0", "1"]
    assert used["times"] == 1
