"""Polar factors by products, beside singular value decompositions."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from natgrad.linalg import polar as polars
from natgrad.linalg.polar import exact_polar, operations, polar

SHAPES = [(7, 7), (5, 40), (40, 5), (1, 9), (9, 1), (1, 1)]
# Largest distance of a singular value from 1, by how many polynomials there are, for those above a
# thousandth of the Frobenius norm.
ACCURACY = {5: 0.13, 6: 1.3e-3, 7: 2e-6, 8: 1e-10}


def with_values(values, shape, dtype=torch.float64, seed=0):
    """A matrix ``[1, rows, cols]`` with these singular values."""
    generator = torch.Generator().manual_seed(seed)
    u, _, v = torch.linalg.svd(
        torch.randn(shape, dtype=torch.float64, generator=generator), full_matrices=False
    )
    return (u * torch.tensor(values, dtype=torch.float64) @ v).unsqueeze(0).to(dtype)


@pytest.mark.parametrize(("steps", "error"), ACCURACY.items())
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_singular_values_above_a_thousandth_become_one(steps, error, scale, dtype):
    values = torch.logspace(0, -2.9, 24).tolist()
    norm = sum(v**2 for v in values) ** 0.5
    values = [v * scale for v in values if v >= 1e-3 * norm]
    x = with_values(values, (len(values), 60), dtype)
    found = torch.linalg.svdvals(polar(x, steps).double())
    assert (found - 1).abs().max() <= error + 2e-5 * (dtype == torch.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_is_the_factor_of_a_singular_value_decomposition(shape):
    x = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert (polar(x, 12) - exact_polar(x)).abs().max() <= 1e-12


@pytest.mark.parametrize("shape", [(6, 9), (9, 6)])
def test_what_is_zero_stays_zero(shape):
    rank = with_values([3.0, 1.0, 0.5, 0.0, 0.0, 0.0], shape)
    found = polar(rank, 12)
    values = torch.linalg.svdvals(found)[0]
    assert torch.allclose(values, torch.tensor([1.0] * 3 + [0.0] * 3, dtype=values.dtype))
    assert torch.allclose(found, exact_polar(rank), atol=1e-9)
    nothing = torch.zeros(2, *shape)
    assert torch.equal(polar(nothing), nothing)
    assert torch.equal(exact_polar(nothing), nothing)


def test_small_ones_end_below_one_and_in_the_right_direction():
    values = [1.0, 0.5, 1e-4, 1e-5]
    found = torch.linalg.svdvals(polar(with_values(values, (4, 20))))[0]
    assert (found[:2] - 1).abs().max() <= 2e-3
    assert 0.1 < found[2] < 0.25
    assert 0.01 < found[3] < 0.03


def test_one_row_is_its_direction_exactly():
    x = torch.randn(4, 1, 30)
    assert torch.equal(polar(x), x / x.norm(dim=2, keepdim=True))
    assert torch.equal(polar(x.mT), polar(x).mT)


def test_each_matrix_of_a_batch_by_itself():
    x = torch.randn(5, 6, 8, dtype=torch.float64)
    x[2] *= 1e6
    alone = torch.cat([polar(one.unsqueeze(0)) for one in x])
    assert (polar(x) - alone).abs().max() <= 1e-12


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 6, 7])
@pytest.mark.parametrize("shape", [(4, 6), (8, 72), (72, 8)])
def test_polynomials_of_the_gram_matrix_are_those_of_the_matrix(steps, shape, monkeypatch):
    x = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    x[1] *= 1e-3 ** torch.rand(shape, dtype=torch.float64)  # and one with small singular values
    by_gram = polar(x, steps)
    monkeypatch.setattr(polars, "WIDE", float("inf"))
    assert (polar(x, steps) - by_gram).abs().max() <= 1e-12


def test_small_singular_values_survive_their_squares_in_float32():
    """Down to a thousandth of the norm, of which a Gram matrix knows a millionth."""
    values = torch.logspace(0, -2.1, 40)
    values /= values.norm()
    values[-10:] = 1.05e-3
    x = with_values(values.tolist(), (40, 360), torch.float32)
    found = torch.linalg.svdvals(polar(x).double())
    assert (found - 1).abs().max() <= 1.4e-3


@pytest.mark.parametrize("shape", [(6, 6), (6, 8), (6, 9), (6, 54), (54, 6), (1, 9)])
@pytest.mark.parametrize("steps", [1, 5, 6])
def test_operations_are_those_of_the_products(shape, steps):
    """Two for every multiplication of a product of matrices, as they are made."""

    class Products(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.baddbmm):
                one, other = args[-2:]
                self.total += 2 * one.shape[0] * one.shape[1] * one.shape[2] * other.shape[2]
            return function(*args, **(kwargs or {}))

    with Products() as seen:
        polar(torch.randn(1, *shape), steps)
    assert seen.total == (operations(*shape, steps) if 1 not in shape else 0)
