"""A long training keeps no more than a short one: neither tensors, nor hooks, nor objects."""

import gc
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD

from natgrad import EKFAC, KFAC, MonteCarloFisher, Rms, Spectral

EARLY = 200


def hooks(model: nn.Module) -> int:
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
        for m in model.modules()
    )


def kept() -> tuple[int, int, Counter[str]]:
    """How many tensors there are, of how many bytes, and natgrad's objects by type."""
    gc.collect()
    objects = gc.get_objects()
    tensors = [t for t in objects if type(t) in (torch.Tensor, nn.Parameter)]
    ours = (type(t) for t in objects)
    names = Counter(t.__qualname__ for t in ours if str(t.__module__).startswith("natgrad."))
    return len(tensors), sum(t.nbytes for t in tensors), names


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, 2000),
        ({"structure": EKFAC()}, 600),
        ({"geometry": Spectral(), "length": Rms(), "momentum": 0.9}, 600),
    ],
    ids=["default", "ekfac", "spectral"],
)
def test_thousands_of_steps(settings, steps):
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3))
    optimizer = SGD(model.parameters(), lr=0.01)
    curvature = MonteCarloFisher() if not settings else None
    kfac = KFAC(model, optimizer, update_every=2, refresh_every=5, curvature=curvature, **settings)
    # What other tests have left must not go away between the two counts.
    there = [o for o in gc.get_objects() if isinstance(o, torch.Tensor)]
    found = {}
    for step in range(steps + 1):
        if step in (EARLY, steps):  # both are steps that update and refresh
            optimizer.zero_grad()
            found[step] = hooks(model), *kept()
        n = 3 + step % 4
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(n, 4)), torch.arange(n) % 3).backward()
        if step % 7 == 0:
            with torch.no_grad():
                model(torch.randn(2, 4))
        if step % 11 == 0:
            model(torch.randn(5, 4))  # and nothing comes back
        kfac.step()
        optimizer.step()
    assert found[steps] == found[EARLY]
    del there
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
