"""Second moments of every entry, over whole gradients of samples."""

from types import SimpleNamespace

import pytest
import torch

from natgrad import Diagonal


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
