"""Which blocks take part in a step."""

import pytest
import torch
from torch import nn

from natgrad import KFAC


@pytest.mark.parametrize("missing", [[], ["weight"], ["bias"], ["weight", "bias"]], ids=str)
def test_a_block_has_a_gradient_if_all_its_parameters_have(missing):
    """A weight without its bias's gradient is no matrix: what is there stays as it is."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 2).double()
    kfac = KFAC(layer, update_every=1, refresh_every=1, kl_clip=None)
    layer(torch.randn(5, 3, dtype=torch.float64)).square().mean().backward()
    for name in missing:
        getattr(layer, name).grad = None
    (block,) = kfac.blocks
    assert block.has_gradient == (not missing)
    before = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    kfac.step()
    for name, p in layer.named_parameters():
        if name in missing:
            assert p.grad is None
        else:
            assert torch.equal(p.grad, before[name]) == bool(missing)
