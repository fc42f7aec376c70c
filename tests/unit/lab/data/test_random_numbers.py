"""Random numbers that depend on their keys alone."""

import numpy as np
import pytest

from natgrad.lab.data.random_numbers import bits, order, uniform


def test_bits_are_those_of_splitmix64():
    """Its first three outputs from the state 0."""
    found = bits(np.arange(3))
    assert [hex(int(one)) for one in found] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]
    assert bits(1) == found[1]


def test_uniform_numbers_are_uniform():
    found = uniform(0, 0, np.arange(20_000), 5)
    assert found.shape == (20_000, 5)
    assert found.min() >= 0
    assert found.max() < 1
    assert found.mean(0) == pytest.approx(0.5, abs=0.008)
    assert found.var(0) == pytest.approx(1 / 12, abs=0.003)
    counts = np.histogram(found, 100, (0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 150  # chi-square with 99 degrees: 148 at 1 in 1000


def test_neighbouring_keys_are_unrelated():
    rows = np.arange(20_000)
    first = uniform(0, 0, rows, 2)
    for other in (uniform(1, 0, rows, 2), uniform(0, 1, rows, 2), uniform(0, 0, rows + 1, 2)):
        assert abs(np.corrcoef(first[:, 0], other[:, 0])[0, 1]) < 0.03
    assert abs(np.corrcoef(first.T)[0, 1]) < 0.03
    # Epoch 1 of seed 0 is not epoch 0 of seed 1.
    assert not np.array_equal(uniform(1, 0, rows, 2), uniform(0, 1, rows, 2))


def test_a_row_has_its_numbers_in_any_company():
    together = uniform(3, 2, np.array([5, 7, 9]), 4)
    assert np.array_equal(together[1:2], uniform(3, 2, np.array([7]), 4))
    assert np.array_equal(together[:, :2], uniform(3, 2, np.array([5, 7, 9]), 2))


def test_order_is_a_permutation_of_its_own():
    found = order(0, 0, 1000)
    assert sorted(found) == list(range(1000))
    assert np.array_equal(found, order(0, 0, 1000))
    for other in (order(0, 1, 1000), order(1, 0, 1000)):
        assert (found == other).mean() < 0.01
    # It says nothing about what is drawn for a row.
    drawn = uniform(0, 0, found, 1)[:, 0]
    assert abs(np.corrcoef(drawn, np.arange(1000))[0, 1]) < 0.1


def test_seeds_of_any_sign_and_size():
    assert bits(-1) != bits(1)
    assert bits(1 << 70) == bits(0)
