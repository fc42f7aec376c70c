"""Norm layers have a damping of their own: a multiple of that of all others."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from natgrad import KFAC, Cholesky, Eigen, Relative


def stepped(inverse, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()
    every = {"update_every": 1, "refresh_every": 1, "kl_clip": None}
    kfac = KFAC(model, inverse=inverse, **every, **settings)
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.randint(2, (8,))
    F.cross_entropy(model(x), y).backward()
    kfac.step()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("inverse", [Eigen(), Cholesky()], ids=repr)
@pytest.mark.parametrize("share", [1.0, 4.0, 0.25])
@pytest.mark.parametrize("kind", [float, Relative])
def test_it_is_a_multiple_for_them_alone(inverse, share, kind):
    found = stepped(inverse, damping=kind(0.1), norm_damping=share)
    others = stepped(inverse, damping=kind(0.1))
    norms = stepped(inverse, damping=kind(0.1 * share))
    for name, gradient in found.items():
        expected = norms if name.startswith("1.") else others
        torch.testing.assert_close(gradient, expected[name])
        if share != 1.0:
            assert not torch.allclose(norms[name], others[name])
