"""A whole training step of a rank on two lanes: what it computes, and what its link carries.

    compute          forward | backward with statistics | fold | decompose | precondition
    communication         gradients and factors, bucket by bucket | share | gather | give back

A bucket leaves when the backward pass has finished its last gradient and the link is free, so that
only what is left at the end of the backward pass is waited for. What follows is K-FAC's own step,
stage after stage as `simulate` prices it: a stage ends when its slowest rank is done. Ranks compute
the same but for the decompositions and products that they own, so one of them stands for all.

Under FSDP weights are gathered unit by unit, in the forward pass and again in the backward pass,
each while the unit before it is computed, and gradients leave by reduce-scatters.

The step of the optimizer itself and reading the data are left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import pairwise

from natgrad.placement.cluster import Cluster
from natgrad.placement.cost import CostModel, Flops
from natgrad.placement.plan import Plan
from natgrad.placement.simulator import Stages, Timeline
from natgrad.placement.workload import Arrival, Workload

# Buckets of DDP, by its default.
_BUCKET = 25 << 20


class Kind(Enum):
    """What a step does: none of K-FAC, only preconditioning, an update of the factors too, and a
    refresh besides."""

    WITHOUT = "without K-FAC"
    STALE = "stale"
    UPDATE = "update"
    REFRESH = "update and refresh"


@dataclass(frozen=True, slots=True)
class Span:
    """What one lane does for some time.

    Arguments:
        lane: ``"compute"`` or ``"communication"``.
        stage: what is done.
        begin: seconds from the start of the step.
        end: seconds from the start of the step.
    """

    lane: str
    stage: str
    begin: float
    end: float


@dataclass(frozen=True)
class TrainingStep:
    """One step of one rank.

    Arguments:
        kind: of step.
        spans: in the order in which they end on each lane.
    """

    kind: Kind
    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """Until all is done."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def exposed(self) -> float:
        """Seconds in which nothing is computed."""
        return self.seconds - sum(s.end - s.begin for s in self.spans if s.lane == "compute")

    def stages(self) -> dict[str, float]:
        """Seconds of every stage, whether something else hides them or not."""
        found: dict[str, float] = {}
        for span in self.spans:
            found[span.stage] = found.get(span.stage, 0.0) + span.end - span.begin
        return found


@dataclass(frozen=True)
class StepModel:
    """What training steps take, of a plan on a cluster.

    Arguments:
        plan: what the ranks do for K-FAC, and how gradients lie on them.
        times: what `simulate` has found for it on ``cluster``.
        workload: what a rank computes besides.
        cluster: speed of the ranks and of the links between them.
        cost: what decompositions cost, in operations, where refreshes are staggered.
    """

    plan: Plan
    times: Timeline
    workload: Workload
    cluster: Cluster
    cost: CostModel = field(default=Flops())

    def step(self, kind: Kind) -> TrainingStep:
        """The lanes of a step.

        Arguments:
            kind: of step.
        """
        if kind not in self._steps:
            self._steps[kind] = self._step(kind)
        return self._steps[kind]

    @cached_property
    def _steps(self) -> dict[Kind, TrainingStep]:
        """Those that have been asked for."""
        return {}

    def _step(self, kind: Kind) -> TrainingStep:
        updates = kind in (Kind.UPDATE, Kind.REFRESH)
        lanes = _Lanes()
        forward, backward = self._compute(updates)
        factors = self._factors if updates else ()
        if self.plan.world.sharded and self.plan.world_size > 1:
            self._sharded(lanes, forward, backward, factors)
        else:
            lanes.work("forward", forward)
            sends = list(factors)
            sums_itself = self.plan.world.gradients_are_local and kind is not Kind.WITHOUT
            if self.plan.world_size > 1 and not sums_itself:
                sends += self._gradients()
            lanes.backward(backward, sends)
        lanes.meet()
        if kind is not Kind.WITHOUT:
            self._own_step(lanes, updates=updates, refreshes=kind is Kind.REFRESH)
        return TrainingStep(kind, tuple(lanes.spans))

    def average(self, update_every: int, refresh_every: int) -> float:
        """Seconds of an average step.

        Arguments:
            update_every: steps from one update to the next.
            refresh_every: steps from one refresh to the next.
        """
        stale, update, refresh = (
            self.step(kind).seconds for kind in (Kind.STALE, Kind.UPDATE, Kind.REFRESH)
        )
        return stale + (update - stale) / update_every + (refresh - update) / refresh_every

    def staggered(self, update_every: int, refresh_every: int) -> tuple[float, float]:
        """Seconds of an average step, and of the longest, if layers are refreshed one after the
        other within ``refresh_every`` steps (`natgrad.schedules.Staggered`).

        The longest step is shorter, the average one longer: in a turn of few layers most ranks have
        nothing to decompose, and wait.

        Arguments:
            update_every: steps from one update to the next.
            refresh_every: steps within which every layer has its turn once.
        """
        turns: dict[int, dict[int, float]] = {}
        count = len(self.plan.blocks)
        for index, block in enumerate(self.plan.blocks):
            loads = turns.setdefault(index * refresh_every // count, {})
            for name in block.decomposed:
                ranks = self.plan.decomposers[block.name, name]
                spec = block.factor(name).split(len(ranks))
                own = self.cost.decompose(spec) / self.cluster.rate(spec.work.by)
                for rank in ranks:
                    loads[rank] = loads.get(rank, 0.0) + own
        each = [max(loads.values(), default=0.0) for loads in turns.values()]
        sent = [self._stages.share / max(1, len(turns))] * len(turns)
        stale, update = (self.step(kind).seconds for kind in (Kind.STALE, Kind.UPDATE))
        average = stale + (update - stale) / update_every + (sum(each) + sum(sent)) / refresh_every
        return average, update + max((a + b for a, b in zip(each, sent, strict=True)), default=0.0)

    # What the lanes carry.

    @property
    def _stages(self) -> Stages:
        assert self.times.stages is not None  # `simulate` always says them
        return self.times.stages

    def _compute(self, updates: bool) -> tuple[float, float]:
        """Seconds of a forward and of a backward pass."""
        each = self.workload.batch / self.cluster.flops
        share = updates * self.workload.measured_share(self.plan.world_size)
        backward = self.workload.backward + share * self.workload.statistics
        return self.workload.forward * each, backward * each

    @property
    def arrivals(self) -> Sequence[Arrival]:
        """As measured, or evenly in pieces of a bucket."""
        if self.workload.arrivals:
            return self.workload.arrivals
        numel = self.workload.parameters
        count = -(-numel * self.workload.parameter_bytes // _BUCKET)
        ends = [numel * index // count for index in range(count + 1)]
        return [Arrival(b - a, b / numel) for a, b in pairwise(ends)]

    @cached_property
    def units(self) -> list[tuple[float, int]]:
        """Buckets of gradients in the order of the backward pass: the share of it that is done when
        one is complete, and its bytes."""
        found: list[tuple[float, int]] = []
        share, size = 0.0, 0
        for arrival in self.arrivals:
            each = arrival.numel * self.workload.parameter_bytes
            if size and size + each > _BUCKET:
                found.append((share, size))
                size = 0
            share, size = arrival.share, size + each
        return [*found, (share, size)]

    def _gradients(self) -> Iterator["_Send"]:
        for share, size in self.units:
            seconds = self.cluster.all_reduce(size, self.plan.world_size)
            yield _Send("gradients", share, seconds)

    @cached_property
    def _factors(self) -> tuple["_Send", ...]:
        """Buckets of factors. Together they take as long as an update, each its part by bytes."""
        shares = {arrival.block: arrival.share for arrival in self.arrivals}  # the last one counts
        sizes = [
            sum(self.plan.copy_bytes(op) for op in ops) for ops in self.plan.cut(self.plan.update)
        ]
        total, done, found = sum(sizes), 0, []
        for factors, size in zip(self.plan.buckets, sizes, strict=True):
            done += size
            ready = [shares.get(block, done / total) for block, _ in factors]
            seconds = self._stages.reduce * size / total
            found.append(_Send("factors", max(ready), seconds))
        return tuple(found)

    def _sharded(
        self, lanes: "_Lanes", forward: float, backward: float, factors: Sequence["_Send"]
    ) -> None:
        world = self.plan.world_size
        shares = [0.0, *(share for share, _ in self.units[:-1]), 1.0]
        parts = [b - a for a, b in pairwise(shares)]
        rings = [self.cluster.ring((world - 1) * size // world, world) for _, size in self.units]
        begin = 0.0
        for part, ring in reversed(list(zip(parts, rings, strict=True))):
            begin = lanes.unit("forward", part * forward, ring, begin)
        left = list(factors)
        for share, part, ring in zip(shares[1:], parts, rings, strict=True):
            begin = lanes.unit("backward", part * backward, ring, begin)
            lanes.send("gradients", ring, lanes.compute)
            while left and left[0].share <= share:
                one = left.pop(0)
                lanes.send(one.stage, one.seconds, lanes.compute)
        for one in left:
            lanes.send(one.stage, one.seconds, lanes.compute)

    def _own_step(self, lanes: "_Lanes", *, updates: bool, refreshes: bool) -> None:
        stages = self._stages
        if updates:
            lanes.work("fold", stages.fold)
        if refreshes:
            lanes.work("decompose", stages.decompose)
            lanes.wait_for("share", stages.share)
        covered = sum(block.numel for block in self.plan.blocks)
        summed = self.plan.all_reduced(max(0, self.workload.parameters - covered))
        if summed:
            lanes.wait_for("gradients", self.cluster.all_reduce(summed, self.plan.world_size))
        lanes.wait_for("gather", stages.gather)
        lanes.work("precondition", stages.precondition)
        lanes.wait_for("give back", stages.give_back)


@dataclass(frozen=True, slots=True)
class _Send:
    """A bucket that leaves after a share of the backward pass."""

    stage: str
    share: float
    seconds: float


class _Lanes:
    """Both lanes of a rank, as far as they have been filled."""

    def __init__(self) -> None:
        self.compute = self.link = 0.0
        self.spans: list[Span] = []

    def work(self, stage: str, seconds: float) -> None:
        if seconds > 0:
            self.spans.append(Span("compute", stage, self.compute, self.compute + seconds))
            self.compute += seconds

    def send(self, stage: str, seconds: float, ready: float) -> None:
        if seconds > 0:
            begin = max(ready, self.link)
            self.spans.append(Span("communication", stage, begin, begin + seconds))
            self.link = begin + seconds

    def backward(self, seconds: float, sends: Sequence[_Send]) -> None:
        begin = self.compute
        self.work("backward", seconds)
        for one in sorted(sends, key=lambda one: one.share):
            self.send(one.stage, one.seconds, begin + one.share * seconds)

    def unit(self, stage: str, seconds: float, gather: float, ready: float) -> float:
        """Gather the weights of a unit from ``ready`` on, then compute it; when that begins."""
        self.send("weights", gather, ready)
        self.compute = begin = max(self.compute, self.link)
        self.work(stage, seconds)
        return begin

    def meet(self) -> None:
        """Both lanes wait for each other."""
        self.compute = self.link = max(self.compute, self.link)

    def wait_for(self, stage: str, seconds: float) -> None:
        self.meet()
        self.send(stage, seconds, self.link)
        self.meet()
