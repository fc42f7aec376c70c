"""Kendall's rank correlation, what chance makes of it, and its mean over single hyperparameters."""

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]


def kendall(x: Sequence[float], y: Sequence[float]) -> float:
    """Kendall's ``τ_b``: pairs in the same order less those in the other, over the root of how many
    pairs differ in x times those that differ in y. 0 where one of them is the same everywhere.

    Arguments:
        x: one number for each thing that is ranked.
        y: another, in the same order.
    """
    return _tau(_signs(x), _signs(y))


def chance(x: Sequence[float], y: Sequence[float], seed: int, draws: int = 1000) -> Numbers:
    """``τ_b [draws]`` where y is permuted, so that it has nothing to do with x.

    Arguments:
        x: one number for each thing that is ranked.
        y: another, in the same order.
        seed: of the permutations.
        draws: how many.
    """
    generator = np.random.default_rng(seed)
    first, second = _signs(x), _signs(y)
    orders = np.stack([generator.permutation(len(x)) for _ in range(draws)])
    # Pairs in the same order less those in the other, [draws]: both matrices have all pairs twice.
    agreed = (first * second[orders[:, :, None], orders[:, None, :]]).sum((1, 2))
    taus: Numbers = agreed / _size(first, second)
    return taus


def granulated(
    settings: Sequence[Mapping[str, float]], x: Sequence[float], y: Sequence[float]
) -> dict[str, float]:
    """By hyperparameter, pairs in the same order less those in the other, over all pairs of things
    that differ in that alone (Jiang et al. 2020, eq. 7). Pairs that are equal in one of the numbers
    count as neither.

    Arguments:
        settings: hyperparameters of each thing, by name.
        x: one number for each.
        y: another, in the same order.
    """
    agreed: dict[str, list[float]] = {name: [] for name in settings[0]}
    for i, j in combinations(range(len(x)), 2):
        differing = [name for name in agreed if settings[i][name] != settings[j][name]]
        if len(differing) == 1:
            sign = np.sign(x[i] - x[j]) * np.sign(y[i] - y[j])
            agreed[differing[0]].append(float(sign))
    return {name: sum(signs) / len(signs) for name, signs in agreed.items() if signs}


def _signs(values: Sequence[float]) -> Numbers:
    """``[n, n]``, the sign of each difference."""
    column = np.asarray(values, dtype=np.float64)[:, None]
    signs: Numbers = np.sign(column - column.T)
    return signs


def _tau(x: Numbers, y: Numbers) -> float:
    return float((x * y).sum()) / _size(x, y)


def _size(x: Numbers, y: Numbers) -> float:
    """Of pairs that differ; 1 if none do, as nothing is then in any order."""
    return float(np.sqrt((x * x).sum() * (y * y).sum())) or 1.0
