"""The search for a learning rate: known ways, and no worse than looking everywhere."""

import itertools

import pytest

from natgrad.lab.compare import rate_search

WORST = (float("inf"),)


def way(score, trials):
    """The exponents that are tried."""
    found = {}
    for _ in range(trials):
        following = rate_search.following(found)
        assert following not in found
        found[following] = score(following)
    return list(found)


def bowl(middle):
    return lambda exponent: (abs(exponent - middle),)


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        (bowl(0.1), [0, 1, -1, 0.5, -0.5, 0.25]),
        (bowl(-0.1), [0, 1, -1, -0.5, 0.5, -0.25]),
        (bowl(1.1), [0, 1, -1, 2, 1.5, 0.5]),
        (bowl(9), [0, 1, -1, 2, 3, 4]),
        (bowl(-9), [0, 1, -1, -2, -3, -4]),
        (lambda e: WORST, [0, 1, -1, -2, -3, -4]),
        (lambda e: WORST if e > -2 else (-e,), [0, 1, -1, -2, -3, -2.5]),
        (lambda e: WORST if e > 0 else (-e,), [0, 1, -1, -0.5, 0.5, -0.25]),
    ],
    ids=["here", "a little down", "up", "far up", "far down", "all diverge", "most", "just below"],
)
def test_ways(score, expected):
    assert way(score, 6) == expected


@pytest.mark.parametrize("middle", [i / 8 for i in range(-20, 21)])
def test_it_comes_close_to_the_best_there_is(middle):
    """With seven trials, to half a step, within two and a half steps of the centre."""
    score = bowl(middle)
    found = rate_search.best({e: score(e) for e in way(score, 7)})
    assert abs(found - middle) <= 0.5


def test_what_was_tried_is_known_by_its_scores():
    score = bowl(1.3)
    tried = way(score, 6)
    found = rate_search.replayed([score(e) for e in tried])
    assert found == {e: score(e) for e in tried}
    assert list(found) == tried
    assert rate_search.following(found) == way(score, 7)[-1]


def test_rates_are_a_factor_of_four_then_two_apart_and_have_three_digits():
    assert [rate_search.rate(0.03, e) for e in (-2, -1, 0, 0.5, 1, 2)] == [
        0.00187,
        0.0075,
        0.03,
        0.06,
        0.12,
        0.48,
    ]
    rates = [rate_search.rate(0.1, e / 8) for e in range(-40, 40)]
    assert all(b / a == pytest.approx(2**0.25, rel=0.01) for a, b in itertools.pairwise(rates))


@pytest.mark.parametrize(
    ("score", "trials"),
    [
        (bowl(0.1), 5),
        (bowl(1.1), 6),
        (bowl(-2.2), 7),
        (bowl(4), 9),
        (lambda e: WORST if e > 0 else (-e,), 5),
    ],
    ids=["here", "up", "down", "far up", "at the edge of divergence"],
)
def test_a_search_is_done_between_rates_a_factor_of_two_away(score, trials):
    """As soon as it is, and not before; one in which all diverge never is."""
    for count in range(1, trials + 1):
        found = {e: score(e) for e in way(score, count)}
        assert rate_search.bracketed(found) == (count == trials)
    best = rate_search.best(found)
    assert {best - 0.5, best + 0.5} <= found.keys()
    assert not rate_search.bracketed(dict.fromkeys(way(lambda e: WORST, 9), WORST))


@pytest.mark.parametrize(
    ("scores", "edge"),
    [
        ({0: (1.0,)}, 0),
        ({0: (1.0,), 1: (0.5,)}, 1),
        ({0: (0.5,), 1: (1.0,)}, -1),
        ({0: (0.5,), 1: WORST, -1: (1.0,)}, 0),
        ({0: (1.0,), 1: (1.0,)}, -1),
    ],
    ids=["one", "highest", "lowest", "between", "equal"],
)
def test_the_outermost(scores, edge):
    assert rate_search.outermost(scores) == edge


def test_of_equal_scores_the_lower_rate_is_the_best():
    assert rate_search.best({0: (1.0,), 1: (1.0,), -1: (2.0,)}) == 0
