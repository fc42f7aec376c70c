"""Decompositions that several ranks of a column do together, where that is faster.

A refresh ends when its slowest rank does, and no rank is faster than the largest factor that one of
them decomposes alone: past some number of ranks more of them gain nothing. An inverse that is made
row by row can be shared out: of k ranks each does ``repeated + shared / k`` operations (a Cholesky
factor, then its rows: ``d^3 / 3 + 2 d^3 / k``), and the rows travel as the inverse would have. What
it costs is that all k need the factor itself, at every update.

So for a limit of seconds every factor gets as few ranks as bring it below; limits fall by steps of
sqrt(2), and the best one counts::

    seconds of the slowest rank / refresh_every
        + bytes that the fullest rank gets / bandwidth / update_every

What is found here is an estimate; the simulator has the last word (`hybrid.placed`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from math import inf, sqrt

from natgrad.placement.cluster import Cluster
from natgrad.placement.cost import CostModel
from natgrad.placement.world import World
from natgrad.specs import BlockSpec, Ranks, as_ranks

_GAIN = 0.9
_LIMITS = 16  # steps of sqrt(2): from all of the largest factor's seconds to a 256th


@dataclass(frozen=True)
class Job:
    """Factors of a block that are decomposed at one place.

    Arguments:
        block: whose they are.
        names: of the factors.
        cost: of decompositions.
        cluster: how fast ranks are.
        most: ranks that may share them out.
    """

    block: BlockSpec
    names: tuple[str, ...]
    cost: CostModel
    cluster: Cluster
    most: int

    @cached_property
    def splits(self) -> tuple[str, ...]:
        """Those factors that can be shared out."""
        if self.block.merged or self.block.in_basis or self.most == 1:
            return ()
        return tuple(name for name in self.names if self.block.factor(name).can_be_split)

    def seconds(self, ranks: int) -> float:
        """Of the busiest of some ranks, the first one, which does alone what cannot be shared out.

        Arguments:
            ranks: how many there are.
        """
        if ranks not in self._seconds:
            found = 0.0
            for name in self.names:
                spec = self.block.factor(name).split(ranks if name in self.splits else 1)
                found += self.cost.decompose(spec) / self.cluster.rate(spec.work.by)
            self._seconds[ranks] = found
        return self._seconds[ranks]

    @cached_property
    def _seconds(self) -> dict[int, float]:
        return {}

    def fewest(self, limit: float) -> int:
        """The fewest ranks, a power of two, with which it ends within a limit; no more than still
        gain a tenth.

        Arguments:
            limit: seconds of a rank.
        """
        if not self.splits:
            return 1
        largest = min(self.most, *(self.block.factor(name).dim for name in self.splits))
        ranks = 1
        while ranks * 2 <= largest and self.seconds(ranks) > limit:
            if self.seconds(2 * ranks) > _GAIN * self.seconds(ranks):
                break
            ranks *= 2
        return ranks

    @cached_property
    def numbers(self) -> int:
        """That travel to every rank at an update."""
        return sum(self.block.factor(name).on_wire for name in self.names)


@dataclass(frozen=True)
class Sharing:
    """Who decomposes the jobs of one column.

    Arguments:
        places: of each job, among the ranks of the column.
        slowest: seconds of the rank with most.
        fullest: numbers of factors that the rank with most gets at an update.
    """

    places: list[Ranks]
    slowest: float
    fullest: int


def share_out(
    columns: Mapping[int, Sequence[Job]], workers: int, world: World, cluster: Cluster
) -> dict[int, list[Ranks]]:
    """The ranks of each job among those of its column.

    Arguments:
        columns: the jobs of each.
        workers: ranks in a column.
        world: how often factors are updated and decomposed.
        cluster: how fast ranks and links are.
    """
    alone = {column: _shared(jobs, workers, inf) for column, jobs in columns.items()}
    if workers == 1 or not any(job.splits for jobs in columns.values() for job in jobs):
        return {column: one.places for column, one in alone.items()}
    best = found = alone
    least = _seconds(alone, world, cluster)
    longest = max(one.slowest for one in alone.values())
    for limit in _limits(longest):
        found = {
            column: _shared(jobs, workers, limit, found[column]) for column, jobs in columns.items()
        }
        seconds = _seconds(found, world, cluster)
        if seconds < least:
            best, least = found, seconds
    return {column: one.places for column, one in best.items()}


def _limits(longest: float) -> Iterator[float]:
    for step in range(1, _LIMITS + 1):
        yield longest / sqrt(2) ** step


def _seconds(shared: Mapping[int, Sharing], world: World, cluster: Cluster) -> float:
    """Of an average step."""
    slowest = max(one.slowest for one in shared.values())
    fullest = max(one.fullest for one in shared.values()) * world.sum_bytes
    link = cluster.bandwidth / cluster.node
    return slowest / world.refresh_every + fullest / link / world.update_every


def _shared(
    jobs: Sequence[Job], workers: int, limit: float, before: Sharing | None = None
) -> Sharing:
    """The longest jobs first, each to the least loaded ranks (`longest_first`). ``before`` is what
    was found for a larger limit, and may be the same."""
    counts = [job.fewest(limit) for job in jobs]
    if before is not None and counts == [len(places) for places in before.places]:
        return before
    each = [job.seconds(count) for job, count in zip(jobs, counts, strict=True)]
    few = range(min(workers, sum(counts)))  # equal ranks are taken in their order: no others are
    load = [(0.0, place) for place in few]
    heapify(load)
    places: list[Ranks] = [range(0)] * len(jobs)
    numbers = dict.fromkeys(few, 0)
    for index in sorted(range(len(jobs)), key=lambda index: -each[index]):
        least = [heappop(load) for _ in range(counts[index])]
        for busy, place in least:
            heappush(load, (busy + each[index], place))
            numbers[place] += jobs[index].numbers
        places[index] = as_ranks(place for _, place in least)
    slowest = max((busy for busy, _ in load), default=0.0)
    return Sharing(places, slowest, max(numbers.values(), default=0))
