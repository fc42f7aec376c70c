"""What numbers are on the wire: of 21 bits, against rounding done with fractions."""

import pickle
from fractions import Fraction
from math import inf, isnan, nan

import pytest
import torch

from natgrad.comm import float21
from natgrad.comm.wire import Plain, wire_of

LARGEST = (2 - 2.0**-12) * 2.0**127  # of 12 bits behind the point
SMALLEST = 2.0**-138  # 12 bits below the smallest normal number, 2^-126


def nearest(x):
    """``x`` as a number of 12 bits of mantissa and 8 of exponent, the even one of two as near."""
    if x == 0 or isnan(x) or x in (inf, -inf):
        return x
    exact, unit = Fraction(abs(x)), Fraction(2) ** -138
    while exact / unit >= 2**13:
        unit *= 2
    found = round(exact / unit) * unit  # Python rounds halves to even
    sign = 1 if x > 0 else -1
    return sign * (float(found) if found <= Fraction(LARGEST) else inf)


def both_ways(numbers):
    return float21.decode(float21.encode(numbers), numbers.shape[-1])


def same(found, expected):
    """Bit by bit, so that signs of zeros count, but for NaNs, which are many."""
    nans = expected.isnan()
    assert torch.equal(found.isnan(), nans)
    bits = (t.masked_fill(nans, 0).view(torch.int32) for t in (found, expected))
    assert torch.equal(*bits)


def of_all_kinds():
    """Every exponent, subnormal numbers, halves between two neighbours, and what is no number."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (3000,), generator=generator).to(torch.int32)
    exponents = torch.arange(256, dtype=torch.int32) << 23
    halves = torch.tensor([0x400, 0xC00, 0x1400, 0x3FF, 0x401, 0x7FFC00, 0x7FFBFF, 0, 0x7FFFFF])
    grid = (exponents[:, None] + halves.int()).flatten()
    numbers = torch.cat([bits, grid, grid | torch.tensor(-(2**31)).int()]).view(torch.float32)
    special = torch.tensor([0.0, -0.0, inf, -inf, nan, LARGEST, -LARGEST, SMALLEST, SMALLEST / 2])
    return torch.cat([numbers, special])


def test_numbers_of_21_bits_are_the_nearest():
    numbers = of_all_kinds()
    expected = torch.tensor([nearest(x) for x in numbers.tolist()], dtype=torch.float64).float()
    same(both_ways(numbers), expected)
    same(float21.rounded(numbers), expected)


def test_every_pattern_of_21_bits_stays():
    """All of them are float32 numbers without their last 11 bits; they are several pieces."""
    bits = torch.arange(2**21, dtype=torch.int32) << 11
    same(both_ways(bits.view(torch.float32)), bits.view(torch.float32))


def test_the_error_is_that_of_13_bits():
    x = torch.rand(10_000, generator=torch.Generator().manual_seed(0)) + 1
    error = ((both_ways(x).double() - x) / x).abs()
    assert 2**-13.1 < error.max() <= 2**-13


@pytest.mark.parametrize("numbers", range(8))
def test_three_are_a_word(numbers):
    x = 1.5 + torch.arange(2.0 * numbers).view(2, numbers)
    words = float21.encode(x)
    assert words.dtype == float21.dtype == torch.int64
    assert words.shape == (2, float21.words(numbers)) == (2, -(-numbers // 3))
    assert (words >= 0).all()
    assert torch.equal(float21.decode(words, numbers), x)


def test_a_word_begins_with_its_first_number():
    """1.0 is 0 01111111 000000000000."""
    one = 0b0_01111111_000000000000
    assert float21.encode(torch.tensor([1.0, 0.0, -1.0])).tolist() == [one | one << 42 | 1 << 62]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_numbers_of_other_dtypes(dtype):
    x = torch.randn(3, 7, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
    rounded = float21.rounded(x.mT)
    assert (rounded.dtype, rounded.shape) == (dtype, (3, 2, 7))
    assert torch.equal(rounded, both_ways(x.mT).to(dtype))
    assert torch.equal(rounded, x.mT) == (dtype != torch.float64)
    assert float21.rounded(x[0, 0, 0]).shape == ()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_dtype_is_a_word_each(dtype):
    x = torch.randn(5)
    wire = wire_of(dtype)
    assert (wire, wire.dtype, wire.words(5), wire.per_word) == (Plain(dtype), dtype, 5, 1)
    assert torch.equal(wire.decode(wire.encode(x), 5), x.to(dtype))
    assert torch.equal(wire.rounded(x), x.to(dtype).float())
    assert repr(wire) == repr(dtype)


def test_other_processes_have_the_same():
    assert wire_of(float21) is float21
    assert pickle.loads(pickle.dumps(float21)) == float21 != Plain(torch.int64)
    assert repr(float21) == "natgrad.comm.float21"
