"""Factors of networks in 16 bits: by float32 products, unless others are asked for."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from natgrad import KFAC

ROUNDOFF = 2.0**-8  # of bfloat16


class Net(nn.Module):
    """Every way to a Kronecker factor: lags, patches, single pixels, rows, looked-up rows, tied."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lags = nn.Conv2d(2, 4, 3, padding=1)
        self.patches = nn.Conv2d(4, 6, 3, stride=2)
        self.groups = nn.Conv2d(6, 6, 3, padding=1, groups=2)
        self.pixels = nn.Conv2d(6, 5, 1, bias=False)
        self.embed = nn.Embedding(7, 5)
        self.rows = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x, indices):
        seen = self.pixels(self.groups(self.patches(self.lags(x)).relu()).relu()).mean((2, 3))
        return self.head(self.rows(seen[:, None] + self.embed(indices)))


def factors(half, autocast=False, **more):
    """Dense, by block and name, of one batch."""
    model = Net() if autocast else Net().bfloat16()
    kfac = KFAC(model, kl_clip=None, half_products=half, **more)
    torch.manual_seed(1)
    x = torch.randn(30, 2, 9, 9)
    indices, y = torch.randint(7, (30, 12)), torch.randint(7, (30 * 12,))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = model(x if autocast else x.bfloat16(), indices)
    F.cross_entropy(out.float().flatten(0, 1), y).backward()
    kfac.step()
    return {
        (block.name, name): block.forms[name].dense(running.mean)
        for block in kfac.blocks
        for name, running in block.running.items()
    }


@pytest.mark.parametrize("autocast", [False, True])
def test_they_round_no_more_than_a_16_bit_sum(autocast):
    """``u sqrt(F_ii F_jj)`` at most; entries of a convolution's factor are made of four sums."""
    exact, rounded = factors(False, autocast), factors(True, autocast)
    moved = {}
    for key, factor in exact.items():
        assert rounded[key].dtype == torch.float32
        error = (rounded[key].double() - factor).abs().max() / factor.abs().max()
        assert error <= 4 * ROUNDOFF, key
        moved[key] = error > 1e-6
    names = {"lags", "patches", "groups", "pixels", "embed", "rows"}
    assert {block for block, _ in moved} == names
    # Under autocast inputs are what the user's code gave, which is mostly float32 here.
    assert all(any(moved[key] for key in moved if key[0] == name) for name in names)
    if not autocast:  # counts, and squares on a diagonal, are no products of matrices
        assert {key for key, one in moved.items() if not one} == {("embed", "A"), ("embed", "At")}


@pytest.mark.parametrize("autocast", [False, True])
def test_the_default_on_a_cpu_is_float32(autocast):
    default, exact = factors(None, autocast), factors(False, autocast)
    assert all(torch.equal(default[key], factor) for key, factor in exact.items())
