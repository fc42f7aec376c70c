"""`natgrad plan`: who does what, and what every placement would cost, before anything runs."""

from pathlib import Path
from typing import Annotated

import typer

from natgrad import KFAC, Distributed
from natgrad.cli import calibration, options, plan_files
from natgrad.cli.collector import no_search_for_cycles
from natgrad.cli.placements import PlacementComparison, Trained
from natgrad.cli.rank_sweep import RankSweep
from natgrad.cli.step_tables import memory_table, recommendation, stage_table
from natgrad.errors import SettingError
from natgrad.lab.models.by_name import NamedNetwork
from natgrad.lab.models.planned import PLANNED, configured
from natgrad.lab.models.spreading import Layout, spread
from natgrad.lab.models.workload import Passes, passes
from natgrad.lab.names import INVERSES, NETWORKS
from natgrad.lab.registry import PATH
from natgrad.lab.report.sizes import network_sizes
from natgrad.placement import CLUSTERS, Plan, Workload, simulate
from natgrad.structures import MAX_DIM
from natgrad.tables import bytes_text

SOME = ("resnet50", "transformer", "bert-large", "gpt2-xl", "llama-70b")  # an error names all


@no_search_for_cycles()
def plan(
    network: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"Such as {', '.join(SOME)}; a config.json; or {PATH}.",
        ),
    ] = None,
    ranks: options.SomeRanksOption = None,
    placement: options.PlacementOption = "auto",
    fraction: options.FractionOption = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="Most that K-FAC may take on a rank, such as 2GiB."),
    ] = None,
    cluster: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"{', '.join(CLUSTERS)}; a measured FILE.json; or flop/s,B/s,s of a rank.",
            show_default=False,
        ),
    ] = "default",
    two_levels: Annotated[
        bool,
        typer.Option("--two-levels", help="Even slices go inside of nodes, then between them."),
    ] = False,
    calibrate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.json", help="Plan nothing: measure this computer, for --cluster."
        ),
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Samples of a rank.")] = 32,
    sample: Annotated[
        str | None,
        typer.Option(metavar="SIZES", help="Shape of one input, of a network of your own."),
    ] = None,
    optimizer_bytes: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Of a number: Adam 8, SGD 4."),
    ] = 4,
    layout: options.LayoutOption = Layout.DDP,
    inverse: options.InverseOption = "eigen",
    update_every: options.UpdateOption = 10,
    refresh_every: options.RefreshOption = 100,
    statistics: options.StatisticsOption = None,
    max_dim: options.MaxDimOption = str(MAX_DIM),
    wire_dtype: Annotated[
        options.WireDtype,
        typer.Option(
            metavar="NAME",
            help=f"Of factors that travel: {', '.join(options.WireDtype)}.",
            show_default=False,
        ),
    ] = options.WireDtype.FLOAT32,
    draw: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw the plan, as .png, .pdf or .svg.")
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the lanes of the three kinds of step.")
    ] = None,
    sweep_fractions: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw memory against seconds over all fractions."),
    ] = None,
    sweep_ranks: Annotated[
        str | None,
        typer.Option(metavar="N,N,…", help="Also compare these numbers of ranks."),
    ] = None,
    draw_sweep: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw what --sweep-ranks compares.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all numbers that are compared.")
    ] = None,
    short: Annotated[bool, typer.Option("--short", help="Only compare the placements.")] = False,
    sizes: Annotated[
        bool, typer.Option("--sizes", help="Plan nothing: print the matrix's size by structure.")
    ] = False,
) -> None:
    """Print who does what, and compare the placements.

    Nothing is trained, or even allocated. Seconds are those of a model of the machines, in which
    the backward pass hides what leaves during it.

    natgrad plan --network resnet50 --ranks 64 --cluster v100-112x4 --batch 32
    """
    if calibrate is not None:
        calibration.calibrate(calibrate, ranks)
        return
    if sizes:
        named = _network(options.needed(network, "--network"))
        typer.echo(network_sizes(named.without_weights()).table())
        return
    network, ranks = options.needed(network, "--network"), options.needed(ranks, "--ranks")
    machines, cost = options.cluster(cluster)
    if two_levels:
        machines = options.in_two_levels(machines, cluster)
    machines.check_ranks(ranks)
    counts = None if sweep_ranks is None else options.rank_counts(sweep_ranks)
    if draw_sweep is not None and counts is None:
        raise SettingError(
            f"--draw-sweep {draw_sweep} draws what --sweep-ranks compares, and there is none: pass "
            "--sweep-ranks, such as 1,4,16,64."
        )
    limit = None if memory_limit is None else options.size(memory_limit, "--memory-limit")
    strategy = options.placement(placement, fraction, limit, machines, cost)
    some = options.statistics(statistics)
    found = _network(network)
    model = found.without_weights()
    shape = found.sample if sample is None else options.shape(sample)
    # Before hooks are on the model.
    counted: Passes | None = None if shape is None else passes(model, shape)
    kfac = KFAC(
        model,
        kl_clip=None,
        inverse=INVERSES[inverse](),
        update_every=update_every,
        refresh_every=refresh_every,
        statistics=some,
        max_dim=options.max_dim(max_dim),
        distributed=Distributed(wire_dtype=wire_dtype.made()),
    )
    workload: Workload | None = None
    if counted is not None:
        workload = counted.workload(
            kfac.blocks,
            kfac.plan.blocks,
            batch=batch,
            optimizer_bytes=optimizer_bytes,
            measured=1.0 if some is None else some,
        )
    elif drawn := timeline or json or counts:
        raise SettingError(
            f"Network {network!r} does not say what its inputs are but --timeline, --sweep-ranks "
            f"and --json ({drawn}) need them: pass the shape of one, such as --sample 3,32,32."
        )
    blocks, world = spread(kfac, ranks, layout)
    compared = PlacementComparison(blocks, world, machines, limit, workload, cost)
    what = f"{network} on {ranks} rank{'' if ranks == 1 else 's'}, {layout.value}, {inverse}"
    title = f"Placements of {what}"
    try:
        chosen = compared.best() if placement == "auto" else strategy(blocks, world)
    except SettingError:  # the others may show what would be possible
        typer.echo(compared.table(title))
        raise
    typer.echo(compared.table(title, chosen))
    trained = None if workload is None else _trained(compared, chosen)
    if trained is not None:
        typer.echo(f"\n{recommendation(compared)}")
        if not short:
            typer.echo(f"\n{stage_table(trained)}")
            typer.echo(f"\n{memory_table(trained)}")
    if not short:
        typer.echo(f"\n{chosen}")
    if limit is not None and not compared.fits(chosen):
        raise SettingError(
            f"{chosen.strategy} takes {bytes_text(chosen.most_memory)} on a rank, "
            f"{bytes_text(chosen.most_memory - limit)} more than --memory-limit "
            f"{bytes_text(limit)}: raise it, or {compared.way_out()}."
        )
    if draw is not None:
        plan_files.save("The plan", "--draw", draw, chosen.draw)
    if timeline is not None and trained is not None:
        plan_files.save("The timeline", "--timeline", timeline, plan_files.timeline(trained))
    if sweep_fractions is not None:
        picture = plan_files.fractions(compared, what)
        plan_files.save("Fractions", "--sweep-fractions", sweep_fractions, picture)
    sweep = None
    if counts is not None and workload is not None:
        for count in counts:
            machines.check_ranks(count)
        sweep = RankSweep(kfac, layout, machines, workload, placement, strategy, counts, cost)
        typer.echo(f"\n{sweep.table(f'{network} by number of ranks')}")
        if draw_sweep is not None:
            plan_files.save("The sweep", "--draw-sweep", draw_sweep, sweep.picture(network))
    if json is not None and trained is not None:
        plan_files.write_json(json, compared, trained, sweep)


def _network(name: str) -> NamedNetwork:
    if name in PLANNED:
        return PLANNED[name]
    known = (*options.SIZED, *PLANNED)
    if not name.endswith(".json") and ":" not in name and name not in NETWORKS.entries():
        raise SettingError(
            f"There is no network {name!r}: name one of {', '.join(known)}, a config.json of "
            f"transformers, or a function that builds it as {PATH}."
        )
    return configured(Path(name)) if name.endswith(".json") else options.network(name)


def _trained(compared: PlacementComparison, chosen: Plan) -> Trained:
    """The chosen plan, which may be none of those that are compared."""
    for one in compared.trained:
        plan = one.model.plan
        if (plan.update, plan.refresh, plan.apply) == (chosen.update, chosen.refresh, chosen.apply):
            return one
    times = simulate(chosen, compared.cluster, compared.cost)
    return compared.train(chosen.strategy, chosen, times)
