"""Placements of one model side by side, and what each costs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

from natgrad.cli import terminal
from natgrad.errors import SettingError
from natgrad.placement import (
    Auto,
    Cluster,
    CostModel,
    Flops,
    Local,
    Plan,
    RankMemory,
    ReduceScatter,
    StepModel,
    Timeline,
    Workload,
    World,
    rank_memory,
    simulate,
)
from natgrad.specs import BlockSpec
from natgrad.tables import Column, Table, bytes_text, seconds_text


@dataclass(frozen=True)
class Trained:
    """A placement with the seconds of its average training step, and what a rank keeps."""

    name: str
    model: StepModel
    seconds: float
    memory: RankMemory

    @property
    def cells(self) -> tuple[str, str]:
        return seconds_text(self.seconds), bytes_text(self.memory.total)


@dataclass(frozen=True)
class PlacementComparison:
    """All placements of the same blocks, priced by the simulator; with a ``workload`` also whole
    training steps."""

    blocks: Sequence[BlockSpec]
    world: World
    cluster: Cluster
    memory_limit: int | None
    workload: Workload | None = None
    cost: CostModel = field(default_factory=Flops)

    @property
    def auto(self) -> Auto:
        return Auto(self.memory_limit, cluster=self.cluster, cost=self.cost)

    @cached_property
    def priced(self) -> list[tuple[Plan, Timeline]]:
        """First those that `Auto` chooses from."""
        strategies = self.auto.candidates(self.world)
        if not self.world.gradients_are_local:
            strategies.append(Local(cost=self.cost, cluster=self.cluster))
        else:
            others = [one(cost=self.cost, cluster=self.cluster) for one in (ReduceScatter, Local)]
            strategies += [one for one in others if one not in strategies]
        plans = (
            strategy(self.blocks, self.world)
            for strategy in terminal.track(strategies, "Comparing placements")
        )
        found = [(plan, simulate(plan, self.cluster, self.cost)) for plan in plans]
        if not self.world.gradients_are_local:
            # Gradients that others have summed leave it nothing to scatter: it is MemOpt.
            plan, times = found[0]
            found.insert(-1, (plan.renamed("ReduceScatter()"), times))
        return found

    def best(self) -> Plan:
        """That of `Auto`."""
        return self.auto.best(self.priced[: len(self.auto.candidates(self.world))])

    def named(self) -> list[tuple[str, Plan, Timeline]]:
        """Those that come to the same are under one name."""
        found: list[tuple[list[str], Plan, Timeline]] = []
        for plan, times in self.priced:
            names = next((names for names, other, _ in found if _ops(plan) == _ops(other)), None)
            if names is None:
                names = []
                found.append((names, plan, times))
            names += self._names(plan)
        return [(" = ".join(names), plan, times) for names, plan, times in found]

    def _names(self, plan: Plan) -> list[str]:
        """The ends of `Hybrid` have names of their own."""
        ends = {"MemOpt()": Fraction(1, self.world.size), "CommOpt()": Fraction(1)}
        own = [name for name, share in ends.items() if plan.strategy == f"Hybrid({share})"]
        return own or [plan.strategy]

    @cached_property
    def trained(self) -> list[Trained]:
        """Whole training steps of those that have a name, if the workload is known."""
        return [self.train(name, plan, times) for name, plan, times in self.named()]

    def train(self, name: str, plan: Plan, times: Timeline) -> Trained:
        assert self.workload is not None  # whoever asks has looked
        model = StepModel(plan, times, self.workload, self.cluster, self.cost)
        seconds = model.average(self.world.update_every, self.world.refresh_every)
        return Trained(name, model, seconds, rank_memory(model))

    def recommended(self) -> Trained | None:
        """The one with the fastest training step of those that give the same result as one rank and
        fit into a rank; None if none does."""
        room = self.cluster.capacity
        same = [one for one in self.trained if one.name != "Local()"]
        found = [one for one in same if room is None or one.memory.total <= room]
        found = [one for one in found if self.fits(one.model.plan)]
        return min(found, key=lambda one: (one.seconds, one.memory.total), default=None)

    def fits(self, plan: Plan) -> bool:
        return self.memory_limit is None or plan.most_memory <= self.memory_limit

    def way_out(self) -> str:
        """What fits where a placement does not, of those that give the same result."""
        same = [(name, plan) for name, plan, _ in self.named() if name != "Local()"]
        name, plan = min(same, key=lambda one: one[1].most_memory)
        least = bytes_text(plan.most_memory)
        if self.fits(plan):
            return f"pass --placement auto: {name} takes {least}"
        return f"use more ranks: the least is {least}"

    def table(self, title: str, chosen: Plan | None = None) -> Table:
        world = self.world
        rows = []
        best = self._best()
        trained = self.trained if self.workload is not None else None
        for index, (name, plan, times) in enumerate(self.named()):
            notes = {
                "chosen": chosen is not None and _ops(plan) == _ops(chosen),
                "Auto": best is not None and _ops(plan) == _ops(best),
                "above the limit": not self.fits(plan),
            }
            step = times.step_seconds(world.update_every, world.refresh_every)
            rows.append(
                (
                    name,
                    seconds_text(step),
                    seconds_text(max(times.update)),
                    seconds_text(max(times.refresh)),
                    seconds_text(max(times.apply)),
                    bytes_text(plan.average_sent()),
                    bytes_text(plan.most_memory),
                    *(() if trained is None else trained[index].cells),
                    ", ".join(note for note, true in notes.items() if true),
                )
            )
        names = ["average step", "update", "refresh", "apply", "sent a step", "memory"]
        if trained is not None:
            names += ["training step", "memory of a rank"]
        columns = (Column("placement"), *(Column(n, "right") for n in names), Column(""))
        measured = "" if isinstance(self.cost, Flops) else ", computations as measured by size"
        footer = (
            f"updates every {world.update_every} and refreshes every {world.refresh_every} steps, "
            f"simulated at {self.cluster.flops:g} flop/s, {self.cluster.bandwidth:g} B/s and "
            f"{self.cluster.latency:g} s{measured}; bytes of the rank with most; K-FAC alone, "
            f"without what {'else the model' if world.gradients_are_local else 'DDP or FSDP'} does"
        )
        if self.workload is not None:
            footer += (
                f"; then whole training steps with {self.workload.batch} samples a rank, in which "
                "the backward pass hides what it can"
            )
        return Table(title, columns, tuple(rows), footer)

    def _best(self) -> Plan | None:
        try:
            return self.best()
        except SettingError:  # nothing fits
            return None


def _ops(plan: Plan) -> object:
    return plan.update, plan.refresh, plan.apply
