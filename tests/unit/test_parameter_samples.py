"""A sample has something of every test and parameter; of values in pairs each two are met."""

import subprocess
import sys
from itertools import combinations, product
from types import SimpleNamespace

import pytest

from parameter_samples import (
    Pairs,
    all_combinations,
    all_pairs,
    covering,
    pairs_of,
    sampled,
    skips_itself,
)

pytest_plugins = ["pytester"]


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


# Pairs.


def met(cases):
    """Each two values of two axes, by their places, that some case has."""
    return {pair for case in cases for pair in combinations(enumerate(case), 2)}


SHAPES = [
    (2, 2, 2),
    (3, 3, 3, 3),
    (7, 3, 2),
    (10, 5, 7, 3),
    (2, 3, 4, 5, 6),
    (1, 4, 1, 3),
    (2,) * 9,
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_pair_is_there(shape):
    cases = list(product(*map(range, shape)))
    chosen = covering(cases)
    assert met(cases[index] for index in chosen) == met(cases)
    assert chosen == sorted(set(chosen))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_more_than_half_again_as_many_as_there_must_be(shape):
    """The values of the two longest axes meet in as many cases as their product."""
    one, other = sorted(shape)[-2:]
    count = len(covering(list(product(*map(range, shape)))))
    assert one * other <= count <= max(1.5 * one * other, one * other + 5)


def test_no_case_that_is_chosen_brings_nothing():
    cases = list(product(range(6), range(5), range(4), range(3)))
    chosen = covering(cases)
    kept = [[cases[index] for index in chosen if index != left] for left in chosen]
    assert sum(met(some) != met(cases) for some in kept) >= 0.9 * len(chosen)


def test_greedy_is_what_a_search_of_all_cases_takes():
    """Which the order of a heap only makes faster."""
    cases = list(product(range(5), range(4), range(3), range(2)))
    missing, slow = met(cases), []
    while missing:
        gains = [len(missing & met([case])) for case in cases]
        slow.append(gains.index(max(gains)))
        missing -= met([cases[slow[-1]]])
    assert covering(cases) == sorted(slow)


def test_two_axes_are_pairs_already():
    assert covering(list(product(range(5), range(4)))) == list(range(20))
    assert covering([(1,), (2,)]) == [0, 1]
    assert covering([]) == []


def test_pairs_that_only_one_case_has_are_found_there():
    """Of a product without some cases: what is left of each pair."""
    cases = [c for c in product(range(4), range(4), range(4)) if c[0] != c[1] or c[2] == 3]
    assert ((0, 2), (1, 2)) in met(cases)
    chosen = [cases[index] for index in covering(cases)]
    assert met(chosen) == met(cases)
    assert (2, 2, 3) in chosen
    assert len(chosen) < 25


def test_what_is_kept_is_not_needed_again():
    cases = list(product(range(6), range(5), range(4)))
    kept = [7, 50, 119]
    chosen = covering(cases, kept)
    assert set(kept) <= set(chosen)
    assert met(cases[index] for index in chosen) == met(cases)
    assert len(chosen) < len(covering(cases)) + len(kept)
    assert covering(cases, range(120)) == list(range(120))


def test_all_pairs_of_anything():
    """Also of values that are equal, or can be neither compared nor hashed."""
    one, other = [[], {}, []], [1, 1.0, True]
    found = all_pairs(one, other, iter([float("nan")] * 2))
    assert all(len(case) == 3 for case in found)
    assert len({(id(a), type(b)) for a, b, _ in found}) == 9
    assert all(any(a is value for value in one) for a, _, _ in found)
    assert len(found) < 18


def test_all_pairs_of_what_means_something():
    axes = range(5), "abcd", range(3)

    def unless(a, b, _):
        return a == 4 and b != "d"

    some, every = all_pairs(*axes, unless=unless), all_combinations(*axes, unless=unless)
    assert len(every) == 60 - 9
    assert every == [case for case in product(*axes) if not unless(*case)]
    assert met(some) == met(every)
    assert len(some) < 26


NAMES = [("layer",), ("structure",), ("inverse", "expected")]
CASES = [
    {"layer": a, "structure": b, "inverse": c, "expected": c}
    for a, b, c in product(range(6), range(5), range(4))
]


def test_cases_that_mean_nothing_are_in_no_run():
    """And what they had is in another case, where there is one."""
    mark = Pairs(unless=lambda structure, layer: structure == 2 and layer < 5)
    some = mark.chosen(NAMES, CASES, all_combinations=False)
    every = mark.chosen(NAMES, CASES, all_combinations=True)
    assert len(every) == 120 - 5 * 4
    assert set(some) < set(every)

    def cases(chosen):
        return [tuple(CASES[index][names[0]] for names in NAMES) for index in chosen]

    assert met(cases(some)) == met(cases(every))
    assert {inverse for _, structure, inverse in cases(some) if structure == 2} == set(range(4))
    assert {layer for layer, structure, _ in cases(some) if structure == 2} == {5}


def test_cases_that_are_in_every_run():
    mark = Pairs(also=lambda layer: layer == 3)
    some = mark.chosen(NAMES, CASES, all_combinations=False)
    assert sum(CASES[index]["layer"] == 3 for index in some) == 20
    assert len(some) < 60
    assert mark.chosen(NAMES, CASES, all_combinations=True) == list(range(120))


SOURCE = """
import pytest

fixture = pytest.fixture(params=["x", "y"])

@fixture
def given(request):
    return request.param

def alone():
    pass

@pytest.mark.parametrize("other", range(9))
def test_without_the_mark(other):
    pass

class TestMany:
    @pytest.mark.pairs(unless=lambda a, c: a == c)
    @pytest.mark.parametrize("a", range(4))
    @pytest.mark.parametrize(("b", "name"), [(b, f"b{b}") for b in range(4)])
    @pytest.mark.parametrize("c", range(4))
    def test_pairs(self, a, b, c, name, given):
        pass

@pytest.mark.pairs
@pytest.mark.parametrize("a", range(5))
@pytest.mark.parametrize("b", [*range(4), pytest.param(4, marks=pytest.mark.skip)])
@pytest.mark.parametrize("c", [0, pytest.param(1, marks=pytest.mark.skipif(True, reason="none"))])
def test_with_skips(a, b, c):
    pass
"""


@pytest.fixture
def items(pytester):
    pytester.makeini("[pytest]\nmarkers = pairs")
    return pytester.getitems(SOURCE)


def test_items_of_tests(items):
    """As pytest collects them: names that come together, the parameters of a fixture, marks of
    single values."""
    chosen = pairs_of(items, all_combinations=False)
    assert chosen == sorted(chosen)
    names = [items[place].name for place in chosen]
    assert len([name for name in names if "without_the_mark" in name]) == 9
    found = [items[p].callspec.params for p in chosen if "test_pairs" in items[p].name]
    assert len(found) < 24  # of 96
    for one, other, count in (
        ("a", "b", 16),
        ("a", "c", 12),
        ("b", "c", 16),
        ("a", "given", 8),
        ("b", "given", 8),
    ):
        assert len({(case[one], case[other]) for case in found}) == count, (one, other)
    assert all(case["name"] == f"b{case['b']}" for case in found)


def test_cases_that_are_skipped_have_no_pairs(items):
    """They are in the run, as reports of what is missing, and nothing is left out for them."""
    chosen = pairs_of(items, all_combinations=False)
    found = [items[p].callspec.params for p in chosen if "with_skips" in items[p].name]
    assert {(case["a"], case["b"]) for case in found if not case["c"] and case["b"] < 4} == set(
        product(range(5), range(4))
    )


def test_all_combinations_of_items(items):
    """But for those that mean nothing."""
    chosen = pairs_of(items, all_combinations=True)
    left = [items[place].callspec.params for place in set(range(len(items))) - set(chosen)]
    assert len(left) == 4 * 4 * 2
    assert all(case["a"] == case["c"] for case in left)


def test_items_that_were_asked_for_are_there(items):
    """One by its name, or some by a word."""
    marked = [item for item in items if item.name.startswith("test_pairs")]
    real = [item for item in marked if item.callspec.params["a"] != item.callspec.params["c"]]
    assert all(pairs_of([item], all_combinations=False) == [0] for item in real)
    few = [item for item in real if item.callspec.params["a"] == 1]
    assert {few[p].callspec.params["c"] for p in pairs_of(few, all_combinations=False)} == {0, 2, 3}


def test_a_case_must_not_skip_itself(items):
    marked = next(item for item in items if item.name.startswith("test_pairs"))
    other = next(item for item in items if "without" in item.name)
    report = SimpleNamespace(when="call", skipped=True)
    assert skips_itself(marked, report)
    assert not skips_itself(other, report)
    assert not skips_itself(marked, SimpleNamespace(when="setup", skipped=True))
    assert not skips_itself(marked, SimpleNamespace(when="call", skipped=False))
    assert not skips_itself(marked, SimpleNamespace(when="call", skipped=True, wasxfail="why"))


def test_the_choice_is_the_same_in_every_process():
    """Workers must collect the same tests: no order of a set, which hashes of strings change."""
    program = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from itertools import product\n"
        "from parameter_samples import covering\n"
        "print(covering(list(product('abcdef', 'uvwxy', 'klmn', 'xyz'))))"
    )
    cases = list(product("abcdef", "uvwxy", "klmn", "xyz"))
    said = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "12345"},
    )
    assert said.stdout == f"{covering(cases)}\n"
