"""The same training on more and more ranks, each with the same batch: seconds of a step, and how
much of the ranks is used."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike

from natgrad import KFAC
from natgrad.cli import terminal
from natgrad.cli.placements import PlacementComparison
from natgrad.lab.models.spreading import Layout, spread
from natgrad.placement import (
    Cluster,
    CostModel,
    Flops,
    Kind,
    Placement,
    Plan,
    StepModel,
    Workload,
    simulate,
)
from natgrad.tables import Column, Table, seconds_text


@dataclass(frozen=True)
class RankPoint:
    """A number of ranks: seconds of an average step and of one without K-FAC."""

    ranks: int
    strategy: str
    seconds: float
    without: float


@dataclass(frozen=True)
class RankSweep:
    """A placement, or the fastest one of each, on several numbers of ranks."""

    kfac: KFAC
    layout: Layout
    cluster: Cluster
    workload: Workload
    name: str
    strategy: Placement
    counts: Sequence[int]
    cost: CostModel = field(default_factory=Flops)

    @cached_property
    def points(self) -> list[RankPoint]:
        return [self._point(n) for n in terminal.track(self.counts, "Comparing numbers of ranks")]

    def _point(self, ranks: int) -> RankPoint:
        plan = self._plan(ranks)
        world = plan.world
        times = simulate(plan, self.cluster, self.cost)
        model = StepModel(plan, times, self.workload, self.cluster, self.cost)
        seconds = model.average(world.update_every, world.refresh_every)
        without = model.step(Kind.WITHOUT).seconds
        return RankPoint(ranks, plan.strategy, seconds, without)

    def _plan(self, ranks: int) -> Plan:
        blocks, world = spread(self.kfac, ranks, self.layout)
        if self.name != "auto":
            return self.strategy(blocks, world)
        compared = PlacementComparison(blocks, world, self.cluster, None, self.workload, self.cost)
        best = compared.recommended()
        return self.strategy(blocks, world) if best is None else best.model.plan

    def efficiency(self, point: RankPoint, of: str = "seconds") -> float:
        """Samples a second of a rank, as a share of those with the fewest ranks."""
        first = min(self.points, key=lambda one: one.ranks)
        return float(getattr(first, of) / getattr(point, of))

    def table(self, title: str) -> Table:
        names = ("ranks", "average step", "efficiency", "without K-FAC", "efficiency")
        rows = tuple(
            (
                f"{point.ranks:,}",
                seconds_text(point.seconds),
                f"{self.efficiency(point):.1%}",
                seconds_text(point.without),
                f"{self.efficiency(point, 'without'):.1%}",
                point.strategy,
            )
            for point in self.points
        )
        columns = (*(Column(name, "right") for name in names), Column("placement"))
        footer = (
            f"{self.workload.batch} samples on each rank; efficiency is that of a rank, against "
            "the fewest ranks"
        )
        return Table(title, columns, rows, footer)

    def picture(self, title: str) -> Callable[[str | PathLike[str]], object]:
        """A function that draws it to a file."""

        def drawn(path: str | PathLike[str]) -> object:
            from matplotlib.figure import Figure

            figure = Figure(figsize=(9, 3.6), layout="constrained")
            times, shares = figure.subplots(1, 2)
            ranks = [point.ranks for point in self.points]
            for of, label, mark in (("seconds", "K-FAC", "o-"), ("without", "without", "s--")):
                times.plot(ranks, [getattr(one, of) for one in self.points], mark, label=label)
                shares.plot(
                    ranks,
                    [100 * self.efficiency(one, of) for one in self.points],
                    mark,
                    label=label,
                )
            for axes, name in ((times, "seconds of an average step"), (shares, "efficiency (%)")):
                axes.set_xscale("log", base=2)
                axes.set_xticks(ranks, [f"{n:,}" for n in ranks], fontsize=8)
                axes.set_ylim(bottom=0)
                axes.set_xlabel("ranks")
                axes.set_ylabel(name)
                axes.legend(frameon=False)
            figure.suptitle(title)
            figure.savefig(path, dpi=150)
            return figure

        return drawn
