"""Uses of a weight in gradients: ``z = W v`` and ``p = W^T q``, as pairs of one matrix."""

import pytest
import torch
from torch import nn

from natgrad import KFAC
from natgrad.layers import inner
from natgrad.layers.inner import InnerUse, TransposedUse, next_use


def uses(bias):
    torch.manual_seed(0)
    module = nn.Linear(3, 2, bias=bias).double()
    (block,) = KFAC(module, kl_clip=None).blocks
    return module, InnerUse(block.layers[0]), TransposedUse(block.layers[0])


def matrices(use, x, g):
    """Of each sample, ``[n, rows, cols]``, put together from the pieces."""
    each = [torch.einsum("bnsr,bnsc->bnrc", rows, cols)[0] for cols, rows in use.pairs(x, g, None)]
    return torch.cat(each)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("together", [1, 2, 100])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_gradient_of_each_sample(bias, together, transposed, monkeypatch):
    """Of the weight alone: neither use adds the bias. Some samples at a time."""
    monkeypatch.setattr(inner, "piece", lambda shape: together)
    module, plain, other = uses(bias)
    x = torch.randn(5, 2 if transposed else 3, dtype=torch.float64)
    g = torch.randn(5, 3 if transposed else 2, dtype=torch.float64)
    found = matrices(other if transposed else plain, x, g)
    assert found.shape == (5, 2, 3 + bias)
    for n in range(5):
        used = module.weight.T @ x[n] if transposed else module.weight @ x[n]
        (expected,) = torch.autograd.grad(used @ g[n], module.weight)
        torch.testing.assert_close(found[n, :, :3], expected)
        assert not found[n, :, 3:].any()


def test_the_backward_pass_of_one_is_the_other():
    _, plain, transposed = uses(True)
    assert type(next_use(plain)) is TransposedUse
    assert type(next_use(transposed)) is InnerUse
