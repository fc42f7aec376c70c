"""What a plan would cost on a cluster.

Collectives take the time that `Cluster` says, computations ``operations / flops``. Ranks start a
collective when all of them have reached it, so the slowest one sets the pace; in the groups of an
all-gather, the slowest of each group. Overlap of communication and computation is not modelled, so
a real run is faster where there is any.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import UnionType

import numpy as np

from natgrad.placement.cluster import Cluster
from natgrad.placement.collectives import Collective, Flows
from natgrad.placement.cost import CostModel, Flops
from natgrad.placement.flows import collectives_of
from natgrad.placement.ops import Gather, Op, Reduce, ReduceGradient, Return, Share
from natgrad.placement.plan import Plan
from natgrad.placement.rank_arrays import Costs, places
from natgrad.placement.routes import ALL_DIRECT, KINDS, Route, Routes, may_leave


@dataclass(frozen=True, slots=True)
class Stages:
    """Seconds of each stage, from when its slowest rank begins to when its slowest rank is done.

    Arguments:
        reduce: of an update: the sums of factors travel.
        decompose: of a refresh: factors are decomposed.
        share: of a refresh: their parts travel.
        all_reduce: of every step: local gradients are summed everywhere.
        gather: of every step: gradients come to the ranks that precondition them.
        precondition: of every step.
        give_back: of every step: preconditioned gradients travel.
        fold: of an update: sums become part of running averages.
    """

    reduce: float
    decompose: float
    share: float
    all_reduce: float
    gather: float
    precondition: float
    give_back: float
    fold: float = 0.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """Predicted times of a plan, each by rank: from a common start until a rank is done.

    Arguments:
        update: seconds of an update of the factors.
        refresh: seconds of a refresh of all factors.
        apply: seconds of preconditioning all gradients.
        memory: bytes that K-FAC takes at the busiest moment, on the rank with most.
        stages: seconds of the stages that these are made of; ``None`` if nobody has looked.
    """

    update: Sequence[float]
    refresh: Sequence[float]
    apply: Sequence[float]
    memory: int
    stages: Stages | None = None

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
    times: Timeline
    for on, by, times in plan.priced:
        if on == cluster and by == cost:
            return times
    times = _simulated(plan, cluster, cost)
    plan.priced.append((cluster, cost, times))
    return times


def _simulated(plan: Plan, cluster: Cluster, cost: CostModel) -> Timeline:
    _, precondition = plan.work_of_all(cost)
    none: Costs = np.zeros(plan.world_size)
    flows = [Flows.none(plan.world_size) for _ in range(3)]
    sums = plan.calls(plan.update)
    come = none + _seconds(plan, cluster, plan.update, sums, in_flight=True, total=flows[0])
    folded = plan.folding_seconds(cluster, cost)
    update = come + folded
    # The memory of what travels is counted as it comes: both need the same collectives.
    _ = plan.update_room
    decomposed = plan.decomposing_seconds(cluster, cost)
    shared = _after(decomposed, plan, cluster, Share, flows[1])
    _ = plan.share_room
    size = plan.all_reduced()
    reduced = none + (cluster.all_reduce(size, plan.world_size) if size else 0.0)
    gathered = _after(reduced, plan, cluster, ReduceGradient | Gather, flows[2])
    _ = plan.gather_room
    ready = gathered + precondition / cluster.flops
    returned = _after(ready, plan, cluster, Return, flows[2])
    _ = plan.return_room
    plan.remember(flows)  # who asks for bytes next need not count them again
    ends = [float(now.max()) for now in (reduced, gathered, ready, returned)]
    refreshed = float(decomposed.max())
    gather, products, give_back = (end - begin for begin, end in pairwise(ends))
    stages = Stages(
        float(come.max()),
        refreshed,
        float(shared.max()) - refreshed,
        ends[0],
        gather,
        products,
        give_back,
        float(folded.max()),
    )
    seconds = [tuple(now.tolist()) for now in (update, shared, returned)]
    return Timeline(seconds[0], seconds[1], seconds[2], plan.most_memory, stages)


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
    counted: list[tuple[Sequence[Op], list[Collective]]] = []
    for kind, name in KINDS.items():
        clock: Sequence[Op] = {Reduce: plan.update, Share: plan.refresh}.get(kind, plan.apply)
        ops = [op for op in clock if isinstance(op, kind) and plan.has_two_routes(op)]
        if not ops:
            continue
        flying = kind is Reduce
        calls = collectives_of(plan, ops, Routes(**{name: Route.BALANCED}))
        balanced = float(_seconds(plan, cluster, ops, calls, in_flight=flying).max())
        # Where ranks are many the messages alone take longer, and need not be looked at.
        if _least(plan, cluster, ops, in_flight=flying) <= balanced:
            messages = collectives_of(plan, ops, ALL_DIRECT)
            direct = float(_seconds(plan, cluster, ops, messages, in_flight=flying).max())
            if direct <= balanced:
                continue
        chosen[name] = Route.BALANCED
        counted.append((ops, calls))
    return plan.along(Routes(**chosen), counted)


def _after(
    start: Costs, plan: Plan, cluster: Cluster, kind: type[Op] | UnionType, total: Flows
) -> Costs:
    """Seconds by rank until the ops of a kind have travelled, each rank having begun at its own
    ``start``. The first collective is one of all ranks, so it waits for the last of them."""
    clock: Sequence[Op] = plan.refresh if kind is Share else plan.apply
    ops = [op for op in clock if isinstance(op, kind)]
    seconds = _seconds(plan, cluster, ops, plan.calls(ops), total=total)
    return start.max() + seconds if seconds.any() else start


def _seconds(
    plan: Plan,
    cluster: Cluster,
    ops: Sequence[Op],
    calls: list[Collective],
    *,
    in_flight: bool = False,
    total: Flows | None = None,
) -> Costs:
    """Seconds by rank of the collectives of some ops. ``in_flight``: they leave during a backward
    pass, several at a time, so that a rank sends for one while it receives for another. Their bytes
    are added to ``total``."""
    if total is not None:
        total.add(calls)
    begin: Costs = np.zeros(plan.world_size)
    if in_flight:
        exchanges = [call.flows for call in calls if call.flows is not None]
        if exchanges:
            sizes = [sum(map(plan.copy_bytes, some)) for some in plan.cut(ops)]
            begin = _flown(exchanges, sizes, cluster)
        calls = [call for call in calls if call.groups is not None]
    return _one_by_one(begin, calls, cluster)


def _one_by_one(now: Costs, calls: Sequence[Collective], cluster: Cluster) -> Costs:
    """Seconds by rank of collectives, each of which begins when all its ranks have reached it. Of
    those that all ranks wait for, only the end of the slowest counts, and of equal ones it is
    looked for once."""
    world = len(now)
    ends: dict[int, float] = {}
    rings: dict[tuple[bool, int, int], float] = {}
    after: float | None = 0.0 if not now.any() else None  # when all ranks are done, if at once
    for index, call in enumerate(calls):
        following = calls[index + 1] if index + 1 < len(calls) else None
        begin = float(now.max()) if after is None else after
        if call.flows is not None:
            if following is None or not following.of_all(world):
                now, after = begin + cluster.exchange(call.flows), None
                continue
            if id(call) not in ends:
                ends[id(call)] = cluster.longest(call.flows)
            after = begin + ends[id(call)]
            continue
        assert call.groups is not None
        size = call.groups.size
        kind = call.sums, call.around, size
        if kind not in rings:
            rings[kind] = (cluster.reduce_scatter if call.sums else cluster.ring)(call.around, size)
        seconds = rings[kind]
        if size == world:
            after = begin + seconds
            continue
        if after is not None:
            now, after = np.full(world, after), None
        ranks = places(call.groups.members)
        now[ranks] = (now[ranks].reshape(-1, size).max(1) + seconds).repeat(size)
    return now if after is None else np.full(world, after)


def _flown(exchanges: Sequence[Flows], sizes: Sequence[int], cluster: Cluster) -> Costs:
    """Seconds by rank of all-to-alls of which several are under way at a time: a bucket leaves when
    the executor lets it (`may_leave`), for which a rank must have got the oldest one. It has when
    its own link has carried that, and the links of those that send it."""
    ranks = len(exchanges[0].sent)
    sent, received, both = (np.zeros(ranks) for _ in range(3))
    under_way: deque[tuple[int, Costs]] = deque()
    ready = np.zeros(ranks)
    for index, flows in enumerate(exchanges):
        size = sizes[index] if len(sizes) == len(exchanges) else 0  # finished slices are no bucket
        while not may_leave(size, [other for other, _ in under_way]):
            ready = np.maximum(ready, under_way.popleft()[1])
        again = cluster.latency if index else 0.0
        sent = np.maximum(sent, ready) + again + cluster.carried(flows.sent.astype(np.float64))
        received = np.maximum(received, ready) + again
        received += cluster.carried(flows.received.astype(np.float64))
        lesser = np.minimum(flows.sent, flows.received)
        both += (1 - cluster.duplex) * cluster.carried(lesser.astype(np.float64))
        gets = np.where(flows.received > 0, sent.max(), 0.0)
        under_way.append((size, np.maximum.reduce([sent, received, gets]) + both))
    last: Costs = cluster.wait(ranks) + np.maximum(sent, received) + both
    return last


def _least(plan: Plan, cluster: Cluster, ops: Sequence[Op], *, in_flight: bool) -> float:
    """Seconds that ops take at least where each goes directly: messages of all buckets at once."""
    cluster = replace(cluster, duplex=1.0)  # directions of different buckets do not add up
    (call,) = collectives_of(plan, ops, ALL_DIRECT, fused=True)
    assert call.flows is not None
    waits = len(plan.cut(ops)) - 1
    return waits * cluster.wait(plan.world_size, in_flight=in_flight) + float(
        cluster.exchange(call.flows).max()
    )
