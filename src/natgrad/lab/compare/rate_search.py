"""Which learning rate is tried next: ``centre · 4^k`` for k = 0, 1, -1, then towards the best.

Outward while the best is the outermost, then half way to its neighbours: five trials around a good
centre end with rates a factor of 2 apart on both sides of the best (`bracketed`). A pure function
of what has been tried, so that a search that was interrupted goes on as it would have.
"""

import math
from collections.abc import Mapping, Sequence

Score = tuple[float, ...]  # the lower the better, compared from its first number on

FIRST = (0.0, 1.0, -1.0)
APART = 4.0  # of the first three; half an exponent is a factor of 2
NEAR = 0.5  # exponents between the best and its neighbours when the search is done


def rate(centre: float, exponent: float) -> float:
    """To three digits, as tables show it."""
    return float(f"{centre * APART**exponent:.3g}")


def following(scores: Mapping[float, Score]) -> float:
    """The next exponent, given the scores of those before it.

    Beyond the best one where it is the outermost, otherwise half way to its farther neighbour, or
    to the better one if both are as far.
    """
    for exponent in FIRST:
        if exponent not in scores:
            return exponent
    middle = best(scores)
    below = max((e for e in scores if e < middle), default=None)
    above = min((e for e in scores if e > middle), default=None)
    if below is None:
        return middle - 1
    if above is None:
        return middle + 1
    down, up = middle - below, above - middle
    if down == up:
        towards = min((below, above), key=lambda e: (scores[e], e))
    else:
        towards = below if down > up else above
    return (middle + towards) / 2


def best(scores: Mapping[float, Score]) -> float:
    """Of equal ones the lowest: where all runs diverge, the way is down."""
    return min(scores, key=lambda exponent: (scores[exponent], exponent))


def replayed(scores: Sequence[Score]) -> dict[float, Score]:
    """By exponent, given those of all trials in their order."""
    found: dict[float, Score] = {}
    for score in scores:
        found[following(found)] = score
    return found


def bracketed(scores: Mapping[float, Score]) -> bool:
    """Whether the best came to its end, between rates at most a factor of 2 from it."""
    middle = best(scores)
    if not math.isfinite(scores[middle][0]):
        return False
    below = max((e for e in scores if e < middle), default=-math.inf)
    above = min((e for e in scores if e > middle), default=math.inf)
    return max(middle - below, above - middle) <= NEAR


def outermost(scores: Mapping[float, Score]) -> int:
    """1 if the best is the highest that was tried, -1 if the lowest, else 0; 0 also for one."""
    middle = best(scores)
    return int(middle == max(scores)) - int(middle == min(scores))
