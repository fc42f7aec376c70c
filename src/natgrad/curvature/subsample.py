"""Which samples of a batch the curvature is measured on, where that is not all of them.

A mean over a quarter of a batch estimates the same Fisher, at a quarter of the products. All
samples of a step are numbered, and the numbers cut into strata of ``1 / share``, of which each has
one that enters:

    stratum(k) = floor(k share + u),    u uniform in [0, 1), or 0 where 1 / share is whole

So every sample enters with probability ``share``, and their number is ``share N`` give or take one,
unlike that of independent draws, whose noise would come on top. Plain strides were not taken: data
in a periodic order (one sample of each class in turn) would show the same class all through a step.

Sample ``j`` of rank ``r`` of ``R`` has number ``j R + r``, as torch's `DistributedSampler` deals
samples out: ``R`` ranks then take the very samples that one process takes. ``j`` counts through
all micro-batches of a step. What is drawn depends on seed, step and number alone (SplitMix64),
so that nothing of it has to be saved.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import gcd

import numpy as np
import numpy.typing as npt

from natgrad.checks import Range, check_whole, number
from natgrad.errors import SettingError

Numbers = npt.NDArray[np.int64]

_PARTS = 1 << 20  # finer shares are rounded to this denominator
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True)
class Subsample:
    """The curvature is measured on some samples of each batch.

    Arguments:
        amount: a share of the samples, a float in (0, 1]; or as an int a number of samples, of each
            forward pass and of all processes together.
        seed: of the choice.
    """

    amount: float
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.amount, int) and not isinstance(self.amount, bool):
            remedy = "pass a number of samples, or a share of them such as 0.25"
            number(self.amount, "statistics", Range(low=1), " samples", remedy)
        else:
            remedy = "pass a share such as 0.25, or an int for a number of samples"
            number(self.amount, "statistics", Range(0, 1, open_low=True), "", remedy)
        check_whole(self.seed, "Subsample.seed", low=0)

    def __call__(
        self, step: int, first: int, count: int, rank: int = 0, ranks: int = 1
    ) -> Numbers | None:
        """Which of ``count`` samples enter, ascending, from 0; ``None`` if all do.

        Arguments:
            step: of training.
            first: how many samples of this step the rank has had before these.
            count: of samples.
            rank: of the process among those that see other samples.
            ranks: how many of these there are.
        """
        p, q = self._share(count * ranks)
        if p >= q or not count:
            return None
        here = np.arange(first, first + count, dtype=np.int64) * ranks + rank
        chosen = np.flatnonzero(self._enter(step, here, p, q))
        if len(chosen) or first or rank:
            return chosen
        # A step without any would say nothing: then one of the first rank's enters.
        if not self._enter(step, np.arange(count * ranks, dtype=np.int64), p, q).any():
            chosen = (_mixed(self.seed, step, -2) % np.uint64(count)).astype(np.int64)
        return chosen

    def _enter(self, step: int, numbers: Numbers, p: int, q: int) -> npt.NDArray[np.bool_]:
        """Of each number whether it is the one of its stratum, for a share of ``p / q``."""
        shift = 0 if p == 1 else int(_mixed(self.seed, step, -1)[0] % np.uint64(q))
        stratum = (numbers * p + shift) // q
        low, end = (-((shift - edge * q) // p) for edge in (stratum, stratum + 1))
        place = _mixed(self.seed, step, stratum) % (end - low).astype(np.uint64)
        found: npt.NDArray[np.bool_] = low + place.astype(np.int64) == numbers
        return found

    def _share(self, samples: int) -> tuple[int, int]:
        """As a fraction."""
        if isinstance(self.amount, int):
            common = gcd(self.amount, max(1, samples))
            return self.amount // common, samples // common
        share = Fraction(float(self.amount)).limit_denominator(_PARTS)
        return (share.numerator, share.denominator) if share else (1, _PARTS)


def subsample_of(given: "float | Subsample | None") -> Subsample | None:
    """What a user has passed as ``statistics``.

    Arguments:
        given: a share, a number of samples, either with a seed, or ``None`` for all samples.
    """
    if given is None or isinstance(given, Subsample):
        return given
    if isinstance(given, int | float) and not isinstance(given, bool):
        return Subsample(given)
    raise SettingError(
        f"statistics is {given!r} but must say which samples the curvature is measured on: pass a "
        "share such as 0.25, a number of samples, or None for all."
    )


def _mixed(*keys: int | Numbers) -> npt.NDArray[np.uint64]:
    """64 random bits for each combination of the keys."""
    found = np.zeros(1, np.uint64)
    for key in keys:
        each = np.uint64(key % (1 << 64)) if isinstance(key, int) else key.astype(np.uint64)
        with np.errstate(over="ignore"):  # arithmetic is meant modulo 2^64
            found = found + (each + np.uint64(1)) * np.uint64(_GOLDEN)
            found = (found ^ (found >> np.uint64(30))) * _FIRST
            found = (found ^ (found >> np.uint64(27))) * _SECOND
            found = found ^ (found >> np.uint64(31))
    return found
