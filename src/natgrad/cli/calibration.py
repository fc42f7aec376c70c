"""`natgrad plan --calibrate`: measures this computer, or the job it runs in, and writes a file."""

from pathlib import Path

import torch
import typer

from natgrad.cli import terminal
from natgrad.comm import Communicator, connect, launch
from natgrad.comm.torchrun import joined
from natgrad.errors import SettingError
from natgrad.lab import calibration
from natgrad.lab.calibration import CalibrationSettings
from natgrad.placement import MeasuredCluster, write_cluster
from natgrad.specs import Routine
from natgrad.tables import Column, Table, bytes_text, seconds_text

SETTINGS = CalibrationSettings()


def calibrate(file: Path, ranks: int | None) -> None:
    """Measure, write and print. Processes that torchrun has started are measured as they are;
    otherwise as many as are asked for are started here, which share the threads of this one."""
    if file.suffix != ".json":
        raise SettingError(
            f"--calibrate is {file} but must be a file for --cluster: give it a name that ends in "
            ".json."
        )
    if not file.absolute().parent.is_dir():
        raise SettingError(
            f"--calibrate is {file} but there is no folder {file.parent}: make it, or name a file "
            "elsewhere."
        )
    with joined() as (comm, device):
        found = _measured(comm, device, ranks)
        if comm.rank == 0:
            write_cluster(found, file)
    if comm.rank == 0:
        typer.echo(computations_table(found))
        if found.collectives:
            typer.echo(f"\n{collectives_table(found)}")
        else:
            typer.echo("\nOne rank has no links to measure: they stay those of the default.")
        typer.echo(f"\nWhat was measured is in {file}: plan with --cluster {file}.")


def _measured(comm: Communicator, device: torch.device, ranks: int | None) -> MeasuredCluster:
    if comm.size == 1 and ranks is not None and ranks > 1:
        threads = max(1, torch.get_num_threads() // ranks)
        found: MeasuredCluster = launch.run(measure, SETTINGS, ranks=ranks, threads=threads)[0]
        return found
    if ranks not in (None, comm.size):
        wrong = SettingError(
            f"--ranks is {ranks} but {comm.size} processes were started, which are measured as "
            "they are: leave it out."
        )
        wrong.everywhere = True
        raise wrong
    return measure(SETTINGS, comm, device)


def measure(
    settings: CalibrationSettings,
    comm: Communicator | None = None,
    device: torch.device | None = None,
) -> MeasuredCluster:
    """On one of the ranks; the first one shows how far it is."""
    comm = comm or connect()
    device = device or torch.device("cpu")
    if comm.rank == 0:
        return calibration.calibrate(comm, device, settings, track=terminal.track)
    return calibration.calibrate(comm, device, settings)


def computations_table(found: MeasuredCluster) -> Table:
    """Seconds of every routine by size, and what products make of them."""
    sizes, about = found.cost.product.sizes, found.measured
    rows = []
    for size in sizes:
        seconds = {routine: found.cost.table(routine).seconds(size) for routine in Routine}
        speed = Routine.PRODUCT.operations(size) / seconds[Routine.PRODUCT] / 1e9
        texts = [seconds_text(seconds[routine]) for routine in Routine]
        rows.append((str(size), texts[0], f"{speed:.3g}", *texts[1:]))
    names = ("rows", "product", "Gflop/s", "eigendecomposition", "Cholesky inverse")
    ranks = f"{about.ranks} rank{'' if about.ranks == 1 else 's'}"
    threads = f"{about.threads} thread{'' if about.threads == 1 else 's'}"
    footer = f"of one square matrix in float32; fastest: {found.cluster.flops:.3g} flop/s"
    title = f"Computations on {ranks} of {threads}, {about.device}"
    return Table(title, tuple(Column(name, "right") for name in names), tuple(rows), footer)


def collectives_table(found: MeasuredCluster) -> Table:
    """Measured seconds of every collective beside those of the fitted links."""
    cluster = found.cluster
    rows = tuple(
        (
            one.kind,
            bytes_text(one.nbytes),
            seconds_text(one.seconds),
            seconds_text(one.predicted(cluster)),
            f"{100 * one.residual(cluster):+.0f}%",
        )
        for one in found.collectives
    )
    columns = (
        Column("collective"),
        *(Column(name, "right") for name in ("buffer", "measured", "fitted", "error")),
    )
    further = ""
    if cluster.overhead is not None:
        further = f", {seconds_text(cluster.overhead)} for each further message"
    footer = (
        f"fitted: latency {seconds_text(cluster.latency)}{further}, "
        f"{bytes_text(cluster.bandwidth)}/s; largest error {100 * found.residual:.0f}%"
    )
    return Table(f"Collectives of {found.measured.ranks} ranks", columns, rows, footer)
