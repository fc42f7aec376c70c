"""A sample has something of every test, and of every parameter."""

from itertools import product

import pytest

from parameter_samples import sampled


@pytest.mark.parametrize("every", [2, 3, 16])
def test_at_least_one_of_each_function(every):
    functions = [name for name in "abc" for _ in range(40)] + ["alone"]
    kept = [functions[index] for index in sampled(functions, every)]
    assert kept.count("alone") == 1
    for name in "abc":
        assert 40 // every <= kept.count(name) <= -(-40 // every)


def test_one_keeps_everything():
    assert sampled("aabbc", 1) == [0, 1, 2, 3, 4]


def test_functions_may_take_turns():
    assert sampled("abababab", 2) == [0, 1, 6, 7]


def test_an_inner_parameter_is_seen_with_all_of_its_values():
    """Also where their number divides that of the sample."""
    items = list(product(range(12), range(4)))
    kept = [items[index] for index in sampled(["f"] * len(items), 4)]
    assert {inner for _, inner in kept} == set(range(4))
    assert {outer for outer, _ in kept} == set(range(12))
