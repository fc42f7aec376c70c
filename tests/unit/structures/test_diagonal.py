"""Second moments of every entry, over whole gradients of samples."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from natgrad import KFAC, Diagonal


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("cols", [1, 4])
@pytest.mark.parametrize("whole", [False, True], ids=["inputs and gradients", "gradients"])
def test_positions_are_summed_before_they_are_squared(positions, cols, whole):
    """One position, or one column, is no other case."""
    samples, groups, rows = 5, 2, 3
    a = torch.randn(groups, samples, positions, cols, dtype=torch.float64)
    g = torch.randn(groups, samples, positions, rows, dtype=torch.float64)
    each = torch.einsum("bnsr,bnsc->bnrc", g, a)
    start = torch.rand(groups * rows * cols, dtype=torch.float64)
    form = Diagonal().form((groups, rows, cols))
    sums = {"F": SimpleNamespace(kept=start.clone(), count=7, form=form)}
    Diagonal().absorb("", (each.transpose(0, 1),) if whole else (a, g), sums, {})
    expected = start.view(groups, rows, cols).clone()
    for n in range(samples):
        for b in range(groups):
            expected[b] += each[b, n].square()
    torch.testing.assert_close(sums["F"].kept.view(groups, rows, cols), expected)
    assert sums["F"].count == 7 + samples


@pytest.mark.parametrize("kind", ["linear", "embedding", "norm"])
@pytest.mark.parametrize("positions", [None, 2])
@pytest.mark.parametrize("vectors", [1, 3])
def test_gradients_of_several_vectors_may_be_one(kind, positions, vectors):
    """Of a linear layer with one position a sample, whose squares are all that counts of them."""
    module = {"linear": nn.Linear(4, 3), "embedding": nn.Embedding(4, 3), "norm": nn.LayerNorm(3)}
    (block,) = KFAC(module[kind], kl_clip=None, structure=Diagonal()).blocks
    shape = (5, 3) if positions is None else (5, positions, 3)
    gs = [torch.randn(shape) for _ in range(vectors)]
    found = Diagonal().folded(block.layers[0], gs)
    if kind == "linear" and positions is None:
        assert len(found) == 1
        torch.testing.assert_close(found[0].square(), sum(g.square() for g in gs))
    else:
        assert list(map(id, found)) == list(map(id, gs))
