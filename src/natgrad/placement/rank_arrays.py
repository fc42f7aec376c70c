"""Sets of ranks as arrays, each made once, as thousands of ops name the same ones. Cached arrays
are never written to."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from natgrad.specs import Ranks

Numbers = NDArray[np.int64]  # of rank 0, 1, …
Costs = NDArray[np.float64]  # likewise


@lru_cache(maxsize=256)
def rows_of(to: Ranks, sources: int, world: int) -> Numbers:
    """Which of some sources serves each rank (`natgrad.specs.server`)."""
    return as_array(to) * sources // world


def common(one: Ranks, other: Ranks) -> Numbers:
    """The places in ``one`` of those that are in ``other`` as well."""
    if isinstance(one, range) and isinstance(other, range) and one and one.step == 1:
        inside = as_array(other) - one.start
        return inside[(inside >= 0) & (inside < len(one))]
    return np.flatnonzero(np.isin(as_array(one), as_array(other), assume_unique=True))


@lru_cache(maxsize=1024)
def as_array(ranks: Ranks) -> Numbers:
    """Ranks in increasing order."""
    if isinstance(ranks, range):
        return np.arange(ranks.start, ranks.stop, ranks.step, dtype=np.int64)
    return np.array(ranks, dtype=np.int64)


def places(ranks: Ranks) -> slice | list[int]:
    """What picks the numbers of some ranks out of an array by rank.

    Arguments:
        ranks: whose numbers are meant.
    """
    return slice(ranks.start, ranks.stop, ranks.step) if isinstance(ranks, range) else list(ranks)


def add(target: Numbers | Costs, ranks: Ranks, amount: float) -> None:
    """Add an amount to those of some ranks, in place.

    Arguments:
        target: of rank 0, 1, ….
        ranks: whose amounts grow.
        amount: by how much.
    """
    target[places(ranks)] += amount
