"""Partial traces of a block, by whole gradients of samples that are written out."""

from types import SimpleNamespace

import pytest
import torch

from natgrad.linalg.forms import Triangle
from natgrad.structures.traces import add_traces, more_positions


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("terms", [1, 2, 6])
@pytest.mark.parametrize(("cols", "rows"), [(4, 3), (3, 4), (1, 5), (5, 1)])
@pytest.mark.parametrize("kept", ["A", "G", "AG"])
def test_of_gradients_of_samples(kept, cols, rows, terms, groups):
    """``sum dW^T dW`` and ``sum dW dW^T``, whether a sample has more terms than rows or fewer."""
    samples = 5
    a = torch.randn(groups, samples, terms, cols, dtype=torch.float64)
    g = torch.randn(groups, samples, terms, rows, dtype=torch.float64)
    each = torch.einsum("bnsr,bnsc->bnrc", g, a)
    expected = {"A": (each.mT @ each).sum(1), "G": (each @ each.mT).sum(1)}
    sums = {}
    for name, dim in (("A", cols), ("G", rows)):
        if name in kept:
            form = Triangle(dim, batch=groups)
            empty = torch.zeros(form.numel, dtype=torch.float64)
            sums[name] = SimpleNamespace(form=form, kept=empty, count=2)
    add_traces(a, g, sums)
    assert set(sums) == set(kept)
    for name, one in sums.items():
        assert one.count == 2 + samples
        torch.testing.assert_close(one.form.dense(one.kept), expected[name])


def test_two_calls_on_the_same_samples_are_positions_of_one():
    one = torch.randn(1, 3, 2, 4), torch.randn(1, 3, 2, 5)
    two = torch.randn(1, 3, 1, 4), torch.randn(1, 3, 1, 5)
    a, g = more_positions(one, two)
    whole = torch.einsum("bnsr,bnsc->bnrc", g, a)
    parts = [torch.einsum("bnsr,bnsc->bnrc", y, x) for x, y in (one, two)]
    torch.testing.assert_close(whole, parts[0] + parts[1])
