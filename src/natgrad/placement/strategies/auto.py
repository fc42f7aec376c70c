"""The cheapest placement that fits into memory, by simulation."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from natgrad.checks import check_positive_fields
from natgrad.errors import SettingError
from natgrad.placement.cluster import Cluster
from natgrad.placement.cost import CostModel, Flops
from natgrad.placement.plan import Plan
from natgrad.placement.simulator import Timeline, simulate
from natgrad.placement.strategies.base import Placement
from natgrad.placement.strategies.hybrid import Hybrid, some_divisors
from natgrad.placement.strategies.reduce_scatter import ReduceScatter
from natgrad.placement.world import World
from natgrad.specs import BlockSpec
from natgrad.tables import bytes_text


@dataclass(frozen=True, slots=True)
class Auto:
    """Simulates `Hybrid` from one worker a block to all, and `ReduceScatter` if gradients are
    local, and takes the fastest that fits into memory.

    Arguments:
        memory_limit: bytes that K-FAC may take on a rank at its busiest moment; ``None`` is
            ``cluster.memory``. If nothing fits, making a plan raises `SettingError`.
        cluster: speeds and memory to simulate with.
        cost: what decompositions and preconditioning cost, in operations.
    """

    memory_limit: float | None = None
    cluster: Cluster = field(default=Cluster(), kw_only=True)
    cost: CostModel = field(default=Flops(), kw_only=True)

    def __post_init__(self) -> None:
        if self.memory_limit is not None:
            check_positive_fields(self, "memory_limit")

    def __call__(self, blocks: Sequence[BlockSpec], world: World) -> Plan:
        plans = (strategy(blocks, world) for strategy in self.candidates(world))
        return self.best((plan, simulate(plan, self.cluster, self.cost)) for plan in plans)

    def candidates(self, world: World) -> list[Placement]:
        """The strategies that are compared.

        Arguments:
            world: number of ranks, whose divisors are workers of a `Hybrid` (all of them, or those
                next to powers of four if there are many), and whether gradients are local.
        """
        strategies: list[Placement] = [
            Hybrid(workers / world.size, cost=self.cost, cluster=self.cluster)
            for workers in some_divisors(world.size)
        ]
        if world.gradients_are_local and world.size > 1:
            strategies.append(ReduceScatter(cost=self.cost, cluster=self.cluster))
        return strategies

    def best(self, priced: Iterable[tuple[Plan, Timeline]]) -> Plan:
        """The fastest plan that fits into memory; raises if none does.

        Arguments:
            priced: the plans of all candidates, each with its simulated times; of equally fast ones
                the smallest is taken.
        """
        limit = self.cluster.memory if self.memory_limit is None else self.memory_limit
        best: tuple[float, int, Plan] | None = None
        least: tuple[int, str] | None = None
        for plan, times in priced:
            needed = times.memory
            if least is None or needed < least[0]:
                least = needed, plan.strategy
            if limit is None or needed <= limit:
                seconds = times.step_seconds(plan.world.update_every, plan.world.refresh_every)
                if best is None or (seconds, needed) < best[:2]:
                    best = seconds, needed, plan
        if best is None:
            assert limit is not None
            assert least is not None
            raise SettingError(
                f"Auto may take {bytes_text(limit)} per rank, but the least that any placement "
                f"takes is {bytes_text(least[0])}, by {least[1]}, {bytes_text(least[0] - limit)} "
                "too much: raise memory_limit to that, use more ranks, or a structure that keeps "
                "less for the largest layers."
            )
        return best[2].renamed(f"Auto: {best[2].strategy}")
