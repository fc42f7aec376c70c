"""The encoder over embedded tokens."""

import torch

from natgrad.lab.models import Transformer


def test_size_and_shape():
    model = Transformer(2, 8, 4, classes=3)
    layer = 4 * 8 * 8 + 4 * 8 + 2 * 4 * 8 * 8 + 5 * 8 + 4 * 8  # attention, feed-forward, two norms
    assert sum(p.numel() for p in model.parameters()) == 2 * layer + 9 * 3
    assert model(torch.randn(2, 5, 8)).shape == (2, 3)


def test_the_order_of_tokens_does_not_matter():
    torch.manual_seed(0)
    model, x = Transformer(1, 8, 2).double(), torch.randn(2, 5, 8, dtype=torch.float64)
    torch.testing.assert_close(model(x), model(x.flip(1)))
