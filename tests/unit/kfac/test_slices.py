"""Weights as wide as a vocabulary: slice by slice the same step, in a fraction of the memory."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import natgrad.kfac.slices as cutting
from natgrad import EKFAC, KFAC, Cholesky, Eigen, Kronecker, Relative, Spectral
from natgrad.geometry import Euclidean
from natgrad.kfac.stacks import SlicedStack
from natgrad.linalg.workspace import release
from oracles import close

SETTINGS = [
    {"inverse": Eigen()},
    {"inverse": Cholesky()},
    {"inverse": Eigen(), "damping": Relative(0.1)},
    {"inverse": Cholesky(), "damping": Relative(0.1)},
    {"structure": EKFAC(gradient_block=1)},
    {"geometry": Euclidean(power=0.5)},
    {"kl_clip": 1e-4},
]


class Words(nn.Module):
    """An embedding, whose A is a diagonal, and a head, whose G is one where it is asked for."""

    def __init__(self, tied):
        super().__init__()
        self.embedding = nn.Embedding(30, 4)
        self.head = nn.Linear(4, 30, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.embedding(x).tanh())


def trained(tied, settings):
    torch.manual_seed(0)
    model = Words(tied).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"structure": Kronecker(gradient_block=1), **settings}
    settings = {"update_every": 1, "refresh_every": 1, **settings}
    kfac = KFAC(model, optimizer, **settings)
    for seed in range(3):
        torch.manual_seed(seed)
        x, y = torch.randint(30, (2, 16))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        kfac.step()
        optimizer.step()
    return list(model.parameters()), kfac


@pytest.mark.parametrize("settings", SETTINGS, ids=repr)
@pytest.mark.parametrize("tied", [False, True])
def test_slices_make_the_step_of_the_whole(tied, settings, monkeypatch):
    whole, kfac = trained(tied, settings)
    assert not any(isinstance(stack, SlicedStack) for stack in kfac.preconditioning.stacks)
    monkeypatch.setattr(cutting, "WHOLE", 40)
    found, kfac = trained(tied, settings)
    cut = [stack for stack in kfac.preconditioning.stacks if isinstance(stack, SlicedStack)]
    assert len(cut) == (1 if tied else 2)
    assert all(stack.numel <= 20 for stack in cut)
    assert all(close(a.detach(), b.detach(), 1e-10) for a, b in zip(found, whole, strict=True))


def test_a_polar_factor_is_of_the_whole_matrix(monkeypatch):
    monkeypatch.setattr(cutting, "WHOLE", 40)
    _, kfac = trained(False, {"geometry": Spectral()})
    assert not any(isinstance(stack, SlicedStack) for stack in kfac.preconditioning.stacks)


def test_a_block_without_a_gradient_is_left_alone(monkeypatch):
    monkeypatch.setattr(cutting, "WHOLE", 40)
    parameters, kfac = trained(False, {"update_every": 100})
    for p in parameters:
        p.grad = None
    parameters[0].grad = torch.ones_like(parameters[0])
    kfac.step()
    assert parameters[1].grad is None
    assert not torch.equal(parameters[0].grad, torch.ones_like(parameters[0]))


def test_a_wide_head_takes_a_fraction_of_its_gradient():
    """6 GiB before, of which a G of 32,000 columns takes nearly all: here a tenth of that width."""
    release()
    model = nn.Linear(512, 20_000, bias=False)
    kfac = KFAC(model, kl_clip=None)
    nn.functional.cross_entropy(model(torch.randn(4, 512)), torch.arange(4)).backward()
    kfac.step()
    gradient = 4 * 512 * 20_000
    kept = sum(kfac.memory().total.values())
    release()
    assert kept < 2.2 * gradient
    assert kfac.memory().total["inverses"] < 4 * (512**2 + 512 + 20_000) + 1


def test_the_plan_of_a_head_of_32000_words():
    """By the plan's own count, for a GPT of width 2,048: without any weight."""
    model = nn.Linear(2048, 32_000, bias=False, device="meta")
    plan = KFAC(model, kl_clip=None).plan
    assert plan.memory(0).total <= 300 << 20


@pytest.mark.parametrize(("rows", "cols"), [(10, 4), (11, 4), (30, 1), (9, 30)])
def test_slices_are_as_few_as_half_the_limit_allows(rows, cols, monkeypatch):
    """Of 20 numbers each, or one row if that has more; of nearly one size, all rows once."""
    monkeypatch.setattr(cutting, "WHOLE", 40)
    found = cutting.slices(SimpleNamespace(shape=(1, rows, cols)), 1)
    most = max(1, 20 // cols)
    assert len(found) == -(-rows // most)
    assert [row for part in found for row in range(part.start, part.stop)] == list(range(rows))
    sizes = {part.stop - part.start for part in found}
    assert max(sizes) <= most
    assert max(sizes) - min(sizes) <= 1
