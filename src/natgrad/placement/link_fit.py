"""Latency, overhead and bandwidth from measured collectives, in the model of `Cluster`.

Of W ranks with one link each, and a buffer of n bytes::

    exchange                      α + o (W - 2) + n (W - 1) / W (2 - duplex) / β
    reduce_scatter, all_gather    α ⌈log2 W⌉    + n (W - 1) / W / β
    total                         twice that

A reduce-scatter may itself be an exchange (``Cluster.exchanged_sums``): whichever fits better. The
seconds are linear in α, o, 1/β and (1 - duplex)/β, which minimise the sum of squared *relative*
errors, so that a call of microseconds counts as much as one of milliseconds. None of them may be
negative: of the ways to hold some at their least value, the best that leaves the others above
theirs is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, log2

import numpy as np

from natgrad.checks import check_positive_fields, check_whole
from natgrad.errors import SettingError
from natgrad.placement.cluster import Cluster
from natgrad.placement.collectives import Flows
from natgrad.placement.rank_arrays import Costs

KINDS = ("exchange", "total", "reduce_scatter", "all_gather")
# What a link cannot be faster than: α and o in seconds, 1/β and (1 - duplex)/β in seconds a byte.
_LEAST = np.array([1e-9, 1e-9, 1e-15, 0.0])


@dataclass(frozen=True, slots=True)
class CollectiveSeconds:
    """What one collective took, at its slowest rank.

    Arguments:
        kind: the method of `natgrad.comm.Communicator` that was called.
        ranks: how many took part, at least 2.
        nbytes: of the whole buffer: what goes in, or what comes out of an ``all_gather``.
        seconds: ``> 0``, from the call to the end of the wait.
    """

    kind: str
    ranks: int
    nbytes: int
    seconds: float

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise SettingError(
                f"CollectiveSeconds.kind is {self.kind!r} but must be one of {', '.join(KINDS)}: "
                "pass one of these."
            )
        check_whole(self.ranks, "CollectiveSeconds.ranks", 2)
        check_whole(self.nbytes, "CollectiveSeconds.nbytes", 1)
        check_positive_fields(self, "seconds")

    @property
    def sent(self) -> int:
        """Bytes that a rank sends to others, once around."""
        return (self.ranks - 1) * self.nbytes // self.ranks

    def is_exchange(self, exchanged_sums: bool) -> bool:
        """Whether it is an all-to-all.

        Arguments:
            exchanged_sums: whether reduce-scatters are.
        """
        return self.kind == "exchange" or (exchanged_sums and self.kind == "reduce_scatter")

    def coefficients(self, exchanged_sums: bool) -> tuple[float, float, float, float]:
        """Of α, o, 1/β and (1 - duplex)/β.

        Arguments:
            exchanged_sums: whether reduce-scatters are all-to-alls.
        """
        if self.is_exchange(exchanged_sums):
            return 1.0, float(self.ranks - 2), float(self.sent), float(self.sent)
        times = 2 if self.kind == "total" else 1
        return float(times * ceil(log2(self.ranks))), 0.0, float(times * self.sent), 0.0

    def predicted(self, cluster: Cluster) -> float:
        """Seconds on a cluster.

        Arguments:
            cluster: speed of the links.
        """
        match self.kind:
            case "exchange":
                flow = np.full(self.ranks, self.sent)
                return float(cluster.exchange(Flows(flow, flow)).max())
            case "total":
                return cluster.all_reduce(self.nbytes, self.ranks)
            case "reduce_scatter":
                return cluster.reduce_scatter(self.sent, self.ranks)
            case _:
                return cluster.ring(self.sent, self.ranks)

    def residual(self, cluster: Cluster) -> float:
        """By how much a prediction is off, relative: 0.1 is ten percent too long.

        Arguments:
            cluster: speed of the links.
        """
        return self.predicted(cluster) / self.seconds - 1


def fit_links(measured: Sequence[CollectiveSeconds], flops: float) -> Cluster:
    """The cluster whose links fit measured collectives best. With two ranks nobody sends a second
    message, so ``overhead`` stays ``None``. Of exchanges alone nobody can tell whether a link is
    slow or has one direction at a time: it is then taken to have both.

    Arguments:
        measured: at least one; of several sizes and kinds, or latency and bandwidth are not told
            apart.
        flops: operations a second of a rank.
    """
    if not measured:
        raise SettingError(
            "fit_links was given no measured collectives but needs at least one: measure some on "
            "two or more ranks, or use Cluster(flops=...)."
        )
    fits = [_fitted(measured, flops, exchanged_sums=one) for one in (False, True)]
    return min(fits, key=lambda one: sum(each.residual(one) ** 2 for each in measured))


def _fitted(
    measured: Sequence[CollectiveSeconds], flops: float, *, exchanged_sums: bool
) -> Cluster:
    rows = np.array([one.coefficients(exchanged_sums) for one in measured])
    rows /= np.array([[one.seconds] for one in measured])
    with_overhead = bool(rows[:, 1].any())
    with_duplex = len({one.is_exchange(exchanged_sums) for one in measured}) == 2
    used = [0, *([1] if with_overhead else []), 2, *([3] if with_duplex else [])]
    found = dict(zip(used, _bounded(rows[:, used], _LEAST[used]).tolist(), strict=True))
    return Cluster(
        flops,
        1 / found[2],
        found[0],
        overhead=found.get(1),
        duplex=max(0.0, 1 - found.get(3, 0.0) / found[2]),
        exchanged_sums=exchanged_sums,
    )


def _bounded(rows: Costs, least: Costs) -> Costs:
    """``x >= least`` that minimises ``|rows x - 1|``; there are at most 16 ways to hold some."""
    scale = np.abs(rows).max(0)  # columns differ by many orders of magnitude
    best, best_error = least, np.inf
    for free in product((True, False), repeat=len(least)):
        found, some = least.copy(), np.array(free)
        if some.any():
            rest = 1 - rows @ np.where(some, 0, least)
            solved = np.linalg.lstsq(rows[:, some] / scale[some], rest, rcond=None)[0]
            found[some] = solved / scale[some]
        error = float(((rows @ found - 1) ** 2).sum())
        if (found >= least).all() and error < best_error:
            best, best_error = found, error
    return best
