"""What a plan would cost on a cluster.

Collectives take the time that `Cluster` says, computations ``operations / flops``. Ranks start a
collective when all of them have reached it, so the slowest one sets the pace; in the groups of an
all-gather, the slowest of each group. Overlap of communication and computation is not modelled, so
a real run is faster where there is any.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from natgrad.placement.cluster import Cluster
from natgrad.placement.cost import CostModel
from natgrad.placement.flows import Costs, Flows, collectives_of, places
from natgrad.placement.ops import Gather, Op, Reduce, ReduceGradient, Return, Share
from natgrad.placement.plan import Plan
from natgrad.placement.routes import KINDS, Route, Routes


@dataclass(frozen=True, slots=True)
class Timeline:
    """Predicted times of a plan, each by rank: from a common start until a rank is done.

    Arguments:
        update: seconds of an update of the factors.
        refresh: seconds of a refresh of all factors.
        apply: seconds of preconditioning all gradients.
        memory: bytes of factors and inverses that the rank with most keeps.
    """

    update: Sequence[float]
    refresh: Sequence[float]
    apply: Sequence[float]
    memory: int

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
    decompose, precondition = plan.work_of_all(cost)
    update, refresh, apply = (_Clock(plan, cluster) for _ in range(3))
    update.send(plan.update, in_flight=True)
    refresh.now += decompose / cluster.flops
    refresh.send(op for op in plan.refresh if isinstance(op, Share))
    apply.all_reduce(plan.all_reduced())
    apply.send(op for op in plan.apply if isinstance(op, ReduceGradient | Gather))
    apply.now += precondition / cluster.flops
    apply.send(op for op in plan.apply if isinstance(op, Return))
    seconds = [tuple(clock.now.tolist()) for clock in (update, refresh, apply)]
    return Timeline(seconds[0], seconds[1], seconds[2], plan.most_memory)


def with_routes(plan: Plan, cluster: Cluster) -> Plan:
    """The plan with the faster route for each kind of op; of equally fast ones the direct one.

    Arguments:
        plan: what the ranks do, by whatever routes.
        cluster: speed of the links; its computations do not matter.
    """
    if plan.world.route is not None:
        return plan.routed(plan.world.route)
    if plan.world_size == 1:
        return plan
    chosen = {}
    for kind, name in KINDS.items():
        clock: Sequence[Op] = {Reduce: plan.update, Share: plan.refresh}.get(kind, plan.apply)
        ops = [op for op in clock if isinstance(op, kind)]
        seconds = {}
        if not any(plan.has_two_routes(op) for op in ops):
            continue
        for route in Route:
            timed = _Clock(plan, cluster, Routes(**{name: route}))
            timed.send(ops, in_flight=kind is Reduce)
            seconds[route] = float(timed.now.max())
        chosen[name] = min(Route, key=seconds.__getitem__)
    return replace(plan, routes=Routes(**chosen))


class _Clock:
    """``now``: seconds by rank."""

    def __init__(self, plan: Plan, cluster: Cluster, routes: Routes | None = None) -> None:
        self.plan, self.cluster, self.routes = plan, cluster, routes or plan.routes
        self.now: Costs = np.zeros(plan.world_size)

    def send(self, ops: Iterable[Op], *, in_flight: bool = False) -> None:
        """``in_flight``: the collectives leave during a backward pass, and nobody waits for one of
        them before the next, so that a rank sends for one while it receives for another."""
        calls = collectives_of(self.plan, ops, self.routes)
        if in_flight:
            exchanges = [call.flows for call in calls if call.flows is not None]
            if exchanges:
                total = Flows(*(sum(numbers) for numbers in zip(*exchanges, strict=True)))
                waits = (len(exchanges) - 1) * self.cluster.latency
                self.now = self.now.max() + waits + self.cluster.exchange(total)
            calls = [call for call in calls if call.groups is not None]
        for call in calls:
            if call.flows is not None:
                self.now = self.now.max() + self.cluster.exchange(call.flows)
                continue
            assert call.groups is not None
            ranks, size = places(call.groups.members), call.groups.size
            seconds = self.cluster.ring(call.around, size)
            begin = self.now[ranks].reshape(-1, size).max(1)
            self.now[ranks] = (begin + seconds).repeat(size)

    def all_reduce(self, size: int) -> None:
        if size:
            seconds = self.cluster.all_reduce(size, self.plan.world_size)
            self.now = np.full_like(self.now, self.now.max() + seconds)
