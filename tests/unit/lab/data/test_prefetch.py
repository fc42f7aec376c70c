"""Batches come in the order of their keys, as they are needed, with the errors of the reader."""

from itertools import count

import pytest
import torch

from natgrad.errors import DataError
from natgrad.lab.data import prefetch


def squared(key):
    if key == 99:
        raise DataError("Sample 99 is spoilt: remove it.")
    return torch.tensor(key) ** 2


def in_the_worker(number):
    torch.set_printoptions(precision=number + 3)


def precision(key):
    return torch._tensor_str.PRINT_OPTS.precision


@pytest.mark.parametrize("workers", [0, 2])
def test_in_the_order_of_the_keys(workers):
    state = torch.get_rng_state()
    found = list(prefetch.read(squared, [3, 1, 2, 5, 4], workers))
    assert [int(one) for one in found] == [9, 1, 4, 25, 16]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("workers", [0, 1])
def test_keys_are_asked_for_as_they_are_needed(workers):
    """Also if there is no end to them."""
    keys = count()
    reading = prefetch.read(squared, keys, workers)
    assert [int(next(reading)) for _ in range(3)] == [0, 1, 4]
    assert next(keys) < 3 + 4


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_are_those_of_the_reader(workers):
    reading = prefetch.read(squared, [1, 99, 2], workers)
    assert int(next(reading)) == 1
    with pytest.raises(DataError, match=r"^Sample 99 is spoilt: remove it\.$"):
        next(reading)


def test_workers_begin_as_they_are_told():
    assert list(prefetch.read(precision, [0], 1, begin=in_the_worker)) == [3]
    assert precision(0) == 4
