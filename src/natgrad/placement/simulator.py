"""What a plan would cost on a cluster.

    exchange               latency + max(sent, received) / bandwidth
    all-reduce of n bytes  latency + 2 (W - 1) / W n / bandwidth
    computation            operations / flops

A rank starts a collective when all ranks have reached it, so the slowest one sets the pace. Overlap
of communication and computation is not modelled, so a real run is faster where there is any.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from natgrad.placement.cost import CostModel, Flops
from natgrad.placement.ops import Gather, Op, ReduceGradient, Return, Share
from natgrad.placement.plan import Plan
from natgrad.placement.world import Cluster


@dataclass(frozen=True, slots=True)
class Timeline:
    """Predicted times of a plan, each a tuple over the ranks: from a common start until a rank is
    done.

    Arguments:
        update: seconds of an update of the factors.
        refresh: seconds of a refresh of all factors.
        apply: seconds of preconditioning all gradients.
        memory: bytes of factors and inverses that are kept.
    """

    update: tuple[float, ...]
    refresh: tuple[float, ...]
    apply: tuple[float, ...]
    memory: tuple[int, ...]

    def step_seconds(self, update_every: int, refresh_every: int) -> float:
        """Seconds of an average step, until the slowest rank is done.

        Arguments:
            update_every: steps from one update to the next.
            refresh_every: steps from one refresh to the next.
        """
        return max(self.update) / update_every + max(self.refresh) / refresh_every + max(self.apply)


def simulate(plan: Plan, cluster: Cluster, cost: CostModel | None = None) -> Timeline:
    """How long a plan would take on a cluster.

    Nothing overlaps here; in a real run computation hides some of the communication.

    Arguments:
        plan: what the ranks do.
        cluster: speed of the ranks and of the links between them.
        cost: what decompositions and preconditioning cost, in operations; ``None`` is ``Flops()``.
    """
    cost = cost or Flops()
    update, refresh, apply = (_Clock(plan, cluster) for _ in range(3))
    update.exchange(plan.update)
    for factor, ranks in plan.decomposers.items():
        refresh.compute(ranks, cost.decompose(plan.factors[factor]))
    refresh.exchange(op for op in plan.refresh if isinstance(op, Share))
    apply.all_reduce(plan.all_reduced())
    apply.exchange(op for op in plan.apply if isinstance(op, ReduceGradient | Gather))
    for name, ranks in plan.workers.items():
        apply.compute(ranks, cost.precondition(plan.block[name]))
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
