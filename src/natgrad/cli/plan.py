"""`natgrad plan`: who does what, and what every placement would cost, before anything runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Annotated

import typer

from natgrad import KFAC, Distributed
from natgrad.cli import calibration, options, terminal
from natgrad.errors import SettingError
from natgrad.lab.names import INVERSES
from natgrad.placement import (
    Auto,
    Cluster,
    CostModel,
    Flops,
    Local,
    Plan,
    ReduceScatter,
    Timeline,
    World,
    simulate,
)
from natgrad.specs import BlockSpec, Piece
from natgrad.tables import Column, Table, bytes_text, seconds_text


def plan(
    network: options.SomeNetworkOption = None,
    ranks: options.SomeRanksOption = None,
    placement: options.PlacementOption = "auto",
    fraction: options.FractionOption = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES", help="Most that a rank may keep of factors and inverses, such as 2GiB."
        ),
    ] = None,
    cluster: Annotated[
        str,
        typer.Option(
            metavar="NUMBERS",
            help="Operations and bytes a second of one rank, seconds of latency; or a measured "
            "FILE.json.",
        ),
    ] = "1e13,1e10,2e-5",
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json", help="Plan nothing: measure this computer, for --cluster."
        ),
    ] = None,
    layout: options.LayoutOption = options.Layout.DDP,
    inverse: options.InverseOption = "eigen",
    update_every: options.UpdateOption = 10,
    refresh_every: options.RefreshOption = 100,
    wire_dtype: Annotated[
        options.WireDtype,
        typer.Option(
            metavar="NAME", help=f"Of factors that travel: {', '.join(options.WireDtype)}."
        ),
    ] = options.WireDtype.FLOAT32,
    draw: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw the plan, as .png, .pdf or .svg.")
    ] = None,
    short: Annotated[bool, typer.Option("--short", help="Only compare the placements.")] = False,
) -> None:
    """Print who keeps, decomposes and preconditions what, and compare the placements.

    Nothing is trained, or even allocated. Seconds are those of a simple model of the machines, in
    which nothing is hidden behind anything.

    natgrad plan --network resnet50 --ranks 64 --placement hybrid --fraction 1/4
    """
    if calibrate is not None:
        calibration.calibrate(calibrate, ranks)
        return
    network, ranks = options.needed(network, "--network"), options.needed(ranks, "--ranks")
    machines, cost = options.cluster(cluster)
    limit = None if memory_limit is None else options.size(memory_limit, "--memory-limit")
    strategy = options.placement(placement, fraction, limit, machines, cost)
    kfac = KFAC(
        options.network(network).without_weights(),
        kl_clip=None,
        inverse=INVERSES[inverse](),
        update_every=update_every,
        refresh_every=refresh_every,
        distributed=Distributed(wire_dtype=wire_dtype.made()),
    )
    blocks, world = spread(kfac, ranks, layout)
    compared = PlacementComparison(blocks, world, machines, limit, cost)
    what = f"{network} on {ranks} rank{'' if ranks == 1 else 's'}, {layout.value}, {inverse}"
    title = f"Placements of {what}"
    try:
        chosen = compared.best() if placement == "auto" else strategy(blocks, world)
    except SettingError:  # the others may show what would be possible
        typer.echo(compared.table(title))
        raise
    typer.echo(compared.table(title, chosen))
    if not short:
        typer.echo(f"\n{chosen}")
    if limit is not None and not compared.fits(chosen):
        raise SettingError(
            f"{chosen.strategy} keeps {bytes_text(chosen.most_memory)} on a rank but "
            f"--memory-limit is {bytes_text(limit)}: raise it, or pass --placement auto."
        )
    if draw is not None:
        save(chosen, draw)
        typer.echo(f"\nThe plan is drawn in {draw}.")


def spread(kfac: KFAC, ranks: int, layout: options.Layout) -> tuple[tuple[BlockSpec, ...], World]:
    """The blocks of a model on one process as they would lie on many."""
    sharded = layout is options.Layout.FSDP
    found = []
    for spec, block in zip(kfac.plan.blocks, kfac.blocks, strict=True):
        rows = [len(parameter) for parameter in block.parameters]
        pieces = (
            _sharded(piece, rows[piece.parameter], ranks)
            if sharded and ranks > 1
            else replace(piece, holders=range(ranks))
            for piece in spec.pieces
        )
        found.append(replace(spec, pieces=tuple(pieces)))
    local = layout is options.Layout.PLAIN and ranks > 1
    world = replace(kfac.plan.world, size=ranks, gradients_are_local=local, sharded=sharded)
    return tuple(found), world


def _sharded(piece: Piece, rows: int, ranks: int) -> Piece:
    """Rank r has the r-th of equal slices of a parameter's rows, the last of which may be short."""
    chunk = -(-rows // ranks)
    start, stop = piece.box[0]
    holders = range(start // chunk, -(-stop // chunk))
    return replace(piece, holders=holders, chunk=chunk if len(holders) > 1 else None)


def save(plan: Plan, path: Path) -> None:
    try:
        plan.draw(path)
    except ModuleNotFoundError as error:
        raise SettingError(str(error)) from error
    except (OSError, ValueError) as error:
        raise SettingError(
            f"The plan cannot be drawn to --draw {path} ({error}): name a file that ends in .png, "
            ".pdf or .svg in a folder that exists."
        ) from error


@dataclass(frozen=True)
class PlacementComparison:
    """All placements of the same blocks, priced by the simulator."""

    blocks: Sequence[BlockSpec]
    world: World
    cluster: Cluster
    memory_limit: int | None
    cost: CostModel = field(default_factory=Flops)

    @property
    def auto(self) -> Auto:
        return Auto(self.memory_limit, cluster=self.cluster, cost=self.cost)

    @cached_property
    def priced(self) -> list[tuple[Plan, Timeline]]:
        """First those that `Auto` chooses from."""
        strategies = self.auto.candidates(self.world)
        others = [one(cost=self.cost, cluster=self.cluster) for one in (ReduceScatter, Local)]
        strategies += [one for one in others if one not in strategies]
        plans = (
            strategy(self.blocks, self.world)
            for strategy in terminal.track(strategies, "Comparing placements")
        )
        return [(plan, simulate(plan, self.cluster, self.cost)) for plan in plans]

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

    def fits(self, plan: Plan) -> bool:
        return self.memory_limit is None or plan.most_memory <= self.memory_limit

    def table(self, title: str, chosen: Plan | None = None) -> Table:
        world = self.world
        rows = []
        best = self._best()
        for name, plan, times in self.named():
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
                    ", ".join(note for note, true in notes.items() if true),
                )
            )
        names = ("average step", "update", "refresh", "apply", "sent a step", "memory")
        columns = (Column("placement"), *(Column(n, "right") for n in names), Column(""))
        measured = "" if isinstance(self.cost, Flops) else ", computations as measured by size"
        footer = (
            f"updates every {world.update_every} and refreshes every {world.refresh_every} steps, "
            f"simulated at {self.cluster.flops:g} flop/s, {self.cluster.bandwidth:g} B/s and "
            f"{self.cluster.latency:g} s{measured}; bytes of the rank with most; K-FAC alone, "
            f"without what {'else the model' if world.gradients_are_local else 'DDP or FSDP'} does"
        )
        return Table(title, columns, tuple(rows), footer)

    def _best(self) -> Plan | None:
        try:
            return self.best()
        except SettingError:  # nothing fits
            return None


def _ops(plan: Plan) -> object:
    return plan.update, plan.refresh, plan.apply
