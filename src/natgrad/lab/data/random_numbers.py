"""Random numbers without a state: ``u = mix(seed, epoch, row, i) / 2⁶⁴``.

What is drawn for a sample depends on these numbers alone, and so neither on the ranks nor on the
workers nor on where a run was interrupted. The mixing is that of SplitMix64.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Chances: TypeAlias = npt.NDArray[np.float64]  # uniform in [0, 1)
Bits: TypeAlias = npt.NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15  # 2⁶⁴ divided by the golden ratio
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_ALL = (1 << 64) - 1


def bits(*keys: int | npt.NDArray[np.integer]) -> Bits:
    """64 random bits for each combination of the keys, which are broadcast against each other."""
    found: Bits = np.zeros(1, np.uint64)
    for key in keys:
        number = np.uint64(key & _ALL) if isinstance(key, int) else key.astype(np.uint64)
        with np.errstate(over="ignore"):  # of scalars; arithmetic is meant modulo 2⁶⁴
            found = _mixed(found + (number + np.uint64(1)) * np.uint64(_GOLDEN))
    return found


def uniform(seed: int, epoch: int, rows: npt.NDArray[np.integer], count: int) -> Chances:
    """``rows [n]`` -> ``[n, count]``, in [0, 1)."""
    found = bits(seed, epoch, rows[:, None], np.arange(count)[None, :])
    return (found >> np.uint64(11)).astype(np.float64) * 2.0**-53


def order(seed: int, epoch: int, count: int) -> npt.NDArray[np.int64]:
    """``[count]``, a permutation."""
    # The last key sets these bits apart from those of `uniform`.
    return np.argsort(bits(seed, epoch, np.arange(count), -1), kind="stable")


def _mixed(found: Bits) -> Bits:
    found = (found ^ (found >> np.uint64(30))) * _FIRST
    found = (found ^ (found >> np.uint64(27))) * _SECOND
    return found ^ (found >> np.uint64(31))
