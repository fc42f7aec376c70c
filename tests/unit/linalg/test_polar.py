"""Polar factors by products, beside singular value decompositions."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from natgrad.linalg import polar as polars
from natgrad.linalg.polar import (
    COEFFICIENTS,
    exact_polar,
    growth,
    half_polar,
    operations,
    polar,
    polynomials,
)

SHAPES = [(7, 7), (5, 40), (40, 5), (1, 9), (9, 1), (1, 1)]
EXACT = 1e-5  # a floor that nothing lies below but zeros, by rounding
# Of 24 singular values these grow small ones by 5, …, 2,450: chains of 2 to 7 polynomials.
FLOORS = (1.0, 0.3, 0.1, 0.03, 0.01, 0.002)


def with_values(values, shape, dtype=torch.float64, seed=0):
    """A matrix ``[1, rows, cols]`` with these singular values."""
    generator = torch.Generator().manual_seed(seed)
    u, _, v = torch.linalg.svd(
        torch.randn(shape, dtype=torch.float64, generator=generator), full_matrices=False
    )
    return (u * torch.tensor(values, dtype=torch.float64) @ v).unsqueeze(0).to(dtype)


def applied(chain, values):
    """What a chain makes of singular values."""
    found = values * chain.scale
    for a, b, c in chain.polynomials:
        found = found * (a + b * found**2 + c * found**4)
    return found


@pytest.mark.parametrize(
    "wanted", [1.0, 6.0, 7.0, 26.0, 28.0, 110.0, 113.0, 460.0, 1900.0, 1e4, 1e9]
)
def test_a_chain_grows_small_values_as_asked_and_brings_the_others_near_one(wanted):
    chain = polynomials(wanted)
    small = torch.tensor([1e-9 / wanted], dtype=torch.float64)
    assert applied(chain, small) / small == pytest.approx(wanted, rel=1e-6)
    values = torch.linspace(0, 1, 100_001, dtype=torch.float64)
    found = applied(chain, values)
    # None grows beyond the interval of the last one, the largest, by rounding, neither.
    assert found.max() <= 1.13
    assert 0.35 < applied(chain, torch.tensor(1.01, dtype=torch.float64)) <= 1.13
    # What would be 1 if it grew as small ones do is not far from it. A first polynomial takes the
    # middle of its interval back to a fifth, from where the others bring it up again.
    assert found[values >= 1 / wanted].min() >= 0.5


def test_the_chain_is_the_shortest():
    lengths = [len(polynomials(w).polynomials) for w in (6, 26, 110, 460, 1900, 3600, 6700)]
    assert lengths == [2, 3, 4, 5, 6, 7, 8]
    assert polynomials(1900).polynomials == COEFFICIENTS[:-1]


def test_ends_of_intervals_are_what_the_polynomials_make_of_them():
    end = 1.0
    for coefficients, known in zip(COEFFICIENTS, polars._ENDS, strict=False):
        assert known == pytest.approx(end, abs=1e-4)
        values = torch.linspace(0, end, 100_001, dtype=torch.float64)
        end = float(applied(polars.Chain(1.0, (coefficients,)), values).max())


@pytest.mark.parametrize("floor", FLOORS)
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_singular_values_are_those_of_the_chain(floor, scale, dtype):
    """Also of matrices with values below the floor, to a hundredth of it."""
    values = torch.logspace(0, -4, 24, dtype=torch.float64)
    x = with_values((values * scale).tolist(), (24, 60), dtype)
    chain = polynomials(growth(floor, x.shape))
    expected = applied(chain, values / values.norm()).sort(descending=True)[0]
    found = torch.linalg.svdvals(polar(x, floor).double())[0]
    assert (found - expected).abs().max() <= (1e-9 if dtype == torch.float64 else 4e-3)
    assert growth(floor, x.shape) == 24**0.5 / floor


@pytest.mark.parametrize("shape", SHAPES)
def test_is_the_factor_of_a_singular_value_decomposition(shape):
    x = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert (polar(x, EXACT) - exact_polar(x)).abs().max() <= 1e-12


@pytest.mark.parametrize("shape", [(6, 9), (9, 6)])
def test_what_is_zero_stays_zero(shape):
    rank = with_values([3.0, 1.0, 0.5, 0.0, 0.0, 0.0], shape)
    found = polar(rank, EXACT)
    values = torch.linalg.svdvals(found)[0]
    assert torch.allclose(values, torch.tensor([1.0] * 3 + [0.0] * 3, dtype=values.dtype))
    assert torch.allclose(found, exact_polar(rank), atol=1e-9)
    nothing = torch.zeros(2, *shape)
    assert torch.equal(polar(nothing), nothing)
    assert torch.equal(exact_polar(nothing), nothing)


def test_small_ones_end_below_one_and_in_the_right_direction():
    """With a root mean square of 0.56, a floor of 1% is 5.6e-3."""
    values = [1.0, 0.5, 5.6e-4, 5.6e-5]
    x = with_values(values, (4, 20))
    found = polar(x, 0.01)
    turned = torch.linalg.vecdot(exact_polar(x).mT, found.mT)  # all in the same basis
    assert (turned <= 1.13).all()
    found = torch.linalg.svdvals(found)[0]
    assert (found[:2] - 1).abs().max() <= 0.13
    assert found[2] == pytest.approx(0.1, rel=0.03)
    assert found[3] == pytest.approx(0.01, rel=0.03)


def test_one_row_is_its_direction_exactly():
    x = torch.randn(4, 1, 30)
    assert torch.equal(polar(x), x / x.norm(dim=2, keepdim=True))
    assert torch.equal(polar(x.mT), polar(x).mT)


def test_each_matrix_of_a_batch_by_itself():
    x = torch.randn(5, 6, 8, dtype=torch.float64)
    x[2] *= 1e6
    alone = torch.cat([polar(one.unsqueeze(0)) for one in x])
    assert (polar(x) - alone).abs().max() <= 1e-12


@pytest.mark.parametrize("floor", FLOORS)
@pytest.mark.parametrize("shape", [(4, 6), (8, 72), (72, 8)])
def test_polynomials_of_the_gram_matrix_are_those_of_the_matrix(floor, shape, monkeypatch):
    x = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    x[1] *= 1e-3 ** torch.rand(shape, dtype=torch.float64)  # and one with small singular values
    by_gram = polar(x, floor)
    monkeypatch.setattr(polars, "WIDE", float("inf"))
    assert (polar(x, floor) - by_gram).abs().max() <= 1e-12


def test_small_singular_values_survive_their_squares_in_float32():
    """Down to a thousandth of the norm, of which a Gram matrix knows a millionth."""
    values = torch.logspace(0, -2.1, 40)
    values /= values.norm()
    values[-10:] = 1.05e-3
    x = with_values(values.tolist(), (40, 360), torch.float32)
    found = torch.linalg.svdvals(polar(x, 40**0.5 / 1900).double())
    assert (found - 1).abs().max() <= 2e-3


@pytest.mark.parametrize("shape", [(6, 6), (6, 8), (6, 9), (6, 54), (54, 6), (1, 9)])
@pytest.mark.parametrize("floor", FLOORS)
def test_operations_are_those_of_the_products(shape, floor):
    """Two for every multiplication of a product of matrices, as they are made."""

    class Products(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.baddbmm):
                one, other = args[-2:]
                self.total += 2 * one.shape[0] * one.shape[1] * one.shape[2] * other.shape[2]
            return function(*args, **(kwargs or {}))

    with Products() as seen:
        polar(torch.randn(1, *shape), floor)
    assert seen.total == (operations(*shape, floor) if 1 not in shape else 0)


SPECTRA = {
    "flat": torch.ones(96),
    "falling": torch.logspace(0, -2, 96),
    "steep": torch.logspace(0, -6, 96),
    "one": torch.cat([torch.ones(1), torch.full((95,), 1e-5)]),
    "rank 10": torch.cat([torch.logspace(0, -1, 10), torch.zeros(86)]),
}


@pytest.mark.parametrize("floor", [0.3, 0.025, 0.001])
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("shape", [(96, 96), (96, 200), (200, 96)])
def test_in_16_bits(spectrum, floor, shape):
    """Large singular values become 1, those below the floor grow by its inverse, nearly.
    None leaves the interval of a polynomial, from where it would grow to thousands."""
    values = SPECTRA[spectrum].double()
    x = with_values(values.tolist(), shape, torch.float32)
    u, _, v = torch.linalg.svd(x[0].double(), full_matrices=False)
    found = half_polar(x, floor)
    assert found.dtype == torch.bfloat16
    assert found.shape == x.shape
    found = (u.mT @ found[0].double() @ v.mT).diagonal()
    rms = float(values.square().mean().sqrt())
    over = values / (max(floor, 2.0**-8) * rms)
    # Of matrices with equal singular values above the floor all are near 1.
    assert (found[over >= 3] - 1).abs().max() <= 0.2
    assert torch.linalg.matrix_norm(half_polar(x, floor)[0].double(), 2) <= 1.2
    small = (over > 0.02) & (over <= 0.1)
    if small.any() and floor >= 0.025:
        # Rounding mixes directions: what is 0.3% of the largest is known as well as that.
        assert ((found - over)[small].abs() <= 0.15 * over[small] + 0.03).all()
    if floor >= 0.025:
        assert (found[over <= 0.02].abs() <= 0.05).all()
    assert torch.equal(half_polar(x, 1e-9), half_polar(x, 2.0**-8))
    for scale in (2.0**-40, 2.0**40):
        assert torch.equal(half_polar(scale * x, floor), half_polar(x, floor))


@pytest.mark.parametrize("around", [0.985, 1.0, 1.015])
@pytest.mark.parametrize("first", range(4))
def test_in_16_bits_rounding_leaves_no_interval(first, around):
    """Where a chain is asked for about as much growth as it has, the largest singular value is next
    to the end of the first interval, beyond which the next polynomials know no bound."""
    most = around * polars._ENDS[first]
    for a, _, _ in COEFFICIENTS[first:-1]:
        most *= a
    x = with_values([1.0, *[0.0] * 95], (96, 96), torch.float32)
    found = half_polar(x, 96**0.5 / most).double()
    assert 0.8 <= torch.linalg.matrix_norm(found[0], 2) <= 1.2


def test_in_16_bits_each_matrix_of_a_stack_by_itself():
    """So that it does not matter which rank has which matrices."""
    x = torch.randn(3, 100, 130)
    x[1] = with_values(torch.logspace(0, -3, 100).tolist(), (100, 130), torch.float32)[0]
    together = half_polar(x)
    for one, whole in zip(x, together, strict=True):
        assert torch.equal(half_polar(one.unsqueeze(0))[0], whole)
    x[0, 3, 4] = torch.nan
    x[2] = 0
    found = half_polar(x)
    assert found[0].isnan().all()
    assert torch.equal(found[1], together[1])
    assert not found[2].any()


def test_in_16_bits_a_flat_spectrum_takes_fewer_polynomials(monkeypatch):
    """The eighth Schatten norm of 96 equal values is 1.8 of them, the Frobenius norm 9.8."""
    taken = []
    inner = polars._of_matrix
    monkeypatch.setattr(
        polars, "_of_matrix", lambda x, chain: taken.append(len(chain)) or inner(x, chain)
    )
    half_polar(with_values(torch.ones(96).tolist(), (96, 96), torch.float32))
    half_polar(with_values(SPECTRA["one"].tolist(), (96, 96), torch.float32))
    # Of four and five, as the first one is made with the norm.
    assert taken == [3, 4]
    assert len(polynomials(growth(0.025, (96, 96))).polynomials) == 5


@pytest.mark.parametrize("shape", [(4, 6), (8, 72), (72, 8)])
def test_in_16_bits_where_the_host_does_not_wait(shape, monkeypatch):
    """As on GPUs: all begin where the Frobenius norm allows it."""
    x = torch.randn(3, *shape)
    monkeypatch.setattr(torch.Tensor, "is_cpu", property(lambda self: False))
    found = half_polar(x).double()
    assert (found - polar(x.double())).abs().max() <= 0.05
