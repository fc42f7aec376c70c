"""What a plan would cost on a cluster: an exchange takes latency + max(sent, received) / bandwidth,
an all-reduce of n bytes latency + 2 (W - 1) / W n / bandwidth, and ranks start both together."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from natgrad.placement.cost import CostModel, Flops
from natgrad.placement.ops import Gather, Op, ReduceGradient, Return, Share
from natgrad.placement.plan import Plan
from natgrad.placement.world import Cluster


@dataclass(frozen=True, slots=True)
class Timeline:
    """By rank: seconds until it is done with an update, a refresh of all factors, and applying
    them, all started together; and bytes of factors and inverses."""

    update: tuple[float, ...]
    refresh: tuple[float, ...]
    apply: tuple[float, ...]
    memory: tuple[int, ...]

    def step_seconds(self, update_every: int, refresh_every: int) -> float:
        """What all ranks together need for an average step."""
        return max(self.update) / update_every + max(self.refresh) / refresh_every + max(self.apply)


def simulate(plan: Plan, cluster: Cluster, cost: CostModel | None = None) -> Timeline:
    """Nothing overlaps here: computations hide some of the messages of a real run."""
    cost = cost or Flops()
    update, refresh, apply = (_Clock(plan, cluster) for _ in range(3))
    update.exchange(plan.update)
    for factor, ranks in plan.decomposers.items():
        refresh.compute(ranks, cost.decompose(plan.factors[factor], plan.world.joint))
    refresh.exchange(op for op in plan.refresh if isinstance(op, Share))
    apply.all_reduce(plan.all_reduced())
    apply.exchange(op for op in plan.apply if isinstance(op, ReduceGradient | Gather))
    for name, ranks in plan.workers.items():
        apply.compute(ranks, cost.precondition(plan.block[name], plan.world.joint))
    apply.exchange(op for op in plan.apply if isinstance(op, Return))
    memory = tuple(plan.memory(rank).total for rank in plan.world.ranks)
    return Timeline(tuple(update.now), tuple(refresh.now), tuple(apply.now), memory)


class _Clock:
    """``now``: seconds by rank."""

    def __init__(self, plan: Plan, cluster: Cluster) -> None:
        self.plan, self.cluster = plan, cluster
        self.now = [0.0] * plan.world_size

    def compute(self, ranks: Iterable[int], operations: float) -> None:
        for rank in ranks:
            self.now[rank] += operations / self.cluster.flops

    def exchange(self, ops: Iterable[Op]) -> None:
        for bucket in self.plan.cut(ops):
            self._together([max(both) for both in zip(*self.plan.flows(bucket), strict=True)])

    def all_reduce(self, size: int) -> None:
        if size:
            ranks = self.plan.world_size
            self._together([2 * (ranks - 1) * size / ranks] * ranks)

    def _together(self, sizes: Sequence[float]) -> None:
        start = max(self.now) + self.cluster.latency
        self.now = [start + size / self.cluster.bandwidth for size in sizes]
