"""Kendall's rank correlation beside loops over all pairs."""

from itertools import combinations, permutations

import numpy as np
import pytest

from natgrad.lab.reproduce.rank_correlation import chance, granulated, kendall


def by_pairs(x, y):
    """The definition of ``τ_b``."""
    same = other = only_x = only_y = 0
    for i, j in combinations(range(len(x)), 2):
        a, b = x[i] - x[j], y[i] - y[j]
        same += a * b > 0
        other += a * b < 0
        only_x += a != 0 and b == 0
        only_y += a == 0 and b != 0
    differ = (same + other + only_x) * (same + other + only_y)
    return (same - other) / differ**0.5 if differ else 0.0


@pytest.mark.parametrize("levels", [3, 100])
def test_is_the_definition_with_ties_and_without(levels):
    draw = np.random.default_rng(levels)
    for _ in range(5):
        x, y = draw.integers(0, levels, (2, 12)).astype(float).tolist()
        assert kendall(x, y) == pytest.approx(by_pairs(x, y), abs=1e-12)


def test_ends():
    x = [1.0, 2.0, 5.0, 9.0]
    assert kendall(x, [10 * value for value in x]) == pytest.approx(1)
    assert kendall(x, [-value for value in x]) == pytest.approx(-1)
    assert kendall(x, [3.0] * 4) == 0.0


def test_chance_is_that_of_all_permutations():
    """Mean and deviation, of four numbers exactly and of twelve by the formula without ties."""
    x, y = [1.0, 2.0, 3.0, 4.0], [4.0, 1.0, 3.0, 2.0]
    every = [by_pairs(x, order) for order in permutations(y)]
    found = chance(x, y, seed=0, draws=1500)
    assert set(np.round(found, 6)) == set(np.round(every, 6))
    assert found.mean() == pytest.approx(0, abs=0.05)
    assert found.std() == pytest.approx(np.std(every), rel=0.08)
    n, numbers = 12, list(map(float, range(12)))
    expected = (2 * (2 * n + 5) / (9 * n * (n - 1))) ** 0.5
    assert chance(numbers, numbers, seed=1).std() == pytest.approx(expected, rel=0.08)
    assert (chance(x, y, seed=0) == chance(x, y, seed=0)).all()


def test_one_thing_at_a_time_by_hand():
    settings = [{"width": w, "rate": r} for w in (1, 2) for r in (0.1, 0.2)]
    # Widths agree in both pairs, rates in one and not in the other.
    x, y = [1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 5.0, 4.0]
    assert granulated(settings, x, y) == {"width": 1.0, "rate": 0.0}
    assert granulated(settings, x, [0.0] * 4) == {"width": 0.0, "rate": 0.0}
