"""Sums over pixels, in pieces of any size."""

import pytest
import torch

from natgrad.layers import norm


@pytest.mark.parametrize("limit", [1, 50, 1 << 19])
@pytest.mark.parametrize("shape", [(5, 3, 4), (5, 3, 2, 7), (1, 2, 3, 1, 2), (0, 3, 4)], ids=str)
def test_products_of_pixels(monkeypatch, limit, shape):
    monkeypatch.setattr(norm, "_PIECE", limit)
    x, g = torch.randn(2, *shape, dtype=torch.float64)
    products, of_g = norm.product_sums(x, g)
    expected = (x * g).flatten(2).sum(2)
    torch.testing.assert_close(products, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(of_g, g.flatten(2).sum(2), rtol=1e-12, atol=1e-12)
