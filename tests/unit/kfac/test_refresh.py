"""Decompositions side by side: the same parts, large ones one after the other."""

import threading

import pytest
import torch
from torch import nn

import natgrad
from natgrad.capture.blocks import Block
from natgrad.kfac import refresh


class Attention(nn.Module):
    """Three projections of one input, which share its factor, and two layers of other sizes."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(12, 12) for _ in range(3))
        self.out, self.head = nn.Linear(12, 40), nn.Linear(40, 3)

    def forward(self, x):
        return self.head(self.out(self.q(x) * self.k(x) + self.v(x)))


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def decomposed(monkeypatch):
    """The names of blocks, and the threads that decomposed them."""
    seen = []
    own = Block.decompose

    def decompose(self, names, damping, rows=None):
        seen.append((self.name, sorted(names), threading.current_thread().name))
        return own(self, names, damping, rows)

    monkeypatch.setattr(Block, "decompose", decompose)
    return seen


def preconditioned(inverse):
    torch.manual_seed(0)
    model = Attention().double()
    kfac = natgrad.KFAC(model, inverse=inverse, kl_clip=None)
    for _ in range(2):
        model.zero_grad()
        model(torch.randn(20, 12, dtype=torch.float64)).square().sum(1).mean().backward()
        kfac.step()
    return [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("inverse", [natgrad.Eigen(), natgrad.Cholesky()], ids=str)
def test_the_number_of_threads_changes_nothing(threads, inverse):
    threads(1)
    expected = preconditioned(inverse)
    for count in (2, 3):
        threads(count)
        for found, own in zip(preconditioned(inverse), expected, strict=True):
            torch.testing.assert_close(found, own, rtol=1e-9, atol=1e-12)


def test_several_at_a_time_and_a_shared_factor_once(threads, decomposed):
    threads(2)
    preconditioned(natgrad.Eigen())
    assert all(thread.startswith("natgrad") for _, names, thread in decomposed if "A" in names)
    first = decomposed[: len(decomposed) // 2]  # of two steps
    assert sorted((name, names) for name, names, _ in first) == [
        ("head", ["A", "G"]),
        ("k", ["G"]),
        ("out", ["A", "G"]),
        ("q", ["G"]),
        ("v", ["A", "G"]),
    ]
    assert first[0][0] == "head"  # the largest factor, of 41, first


def test_large_ones_are_decomposed_alone(threads, decomposed, monkeypatch):
    monkeypatch.setattr(refresh, "_LARGE", 40)
    threads(2)
    preconditioned(natgrad.Eigen())
    alone = {name for name, _, thread in decomposed if not thread.startswith("natgrad")}
    assert alone == {"head"}


def test_layers_on_one_input_keep_parts_of_their_own(threads):
    """What one of them replaces in place must not change in the other."""
    threads(2)
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 3)])
    kfac = natgrad.KFAC(model, kl_clip=None)
    x = torch.randn(20, 6)
    sum(layer(x).square().sum(1).mean() for layer in model).backward()
    kfac.step()
    first, second = kfac.blocks
    assert {first.shares_input_with, second.shares_input_with} == {
        None,
        first if second.shares_input_with else second,
    }
    assert torch.equal(first.parts["A"][0], second.parts["A"][0])
    assert first.parts["A"][0].data_ptr() != second.parts["A"][0].data_ptr()


def test_a_layer_that_once_saw_another_input_is_decomposed_by_itself(threads):
    threads(2)
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 3)]).double()
    kfac = natgrad.KFAC(model, kl_clip=None, update_every=1, refresh_every=1)
    for same in (True, False, True):
        x, z = torch.randn(2, 20, 6, dtype=torch.float64)
        model.zero_grad()
        seen = (x, x if same else z)
        losses = [m(y).square().sum(1).mean() for m, y in zip(model, seen, strict=True)]
        sum(losses).backward()
        kfac.step()
    assert any(block.shares_input_with is not None for block in kfac.blocks)
    for block in kfac.blocks:
        factor = block.forms["A"].dense(block.running["A"].mean)[0]
        values = torch.linalg.eigvalsh(factor)
        torch.testing.assert_close(block.parts["A"][1][0], values, rtol=1e-9, atol=1e-12)
