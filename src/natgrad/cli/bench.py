"""`natgrad bench`: a few steps of K-FAC on processes of this machine, and what each of them did."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import nn

from natgrad import KFAC, Distributed
from natgrad.cli import options, terminal, trace
from natgrad.cli.trace import Profile, Record, SpanStopwatch
from natgrad.comm import ProcessGroups, launch
from natgrad.comm.recording import Recording
from natgrad.errors import SettingError
from natgrad.lab.models.spreading import Layout
from natgrad.lab.names import INVERSES
from natgrad.placement import Placement
from natgrad.tables import Column, Table, bytes_text, seconds_text


def bench(
    network: options.NetworkOption,
    ranks: options.RanksOption = 2,
    placement: options.PlacementOption = "auto",
    fraction: options.FractionOption = None,
    layout: options.LayoutOption = Layout.DDP,
    inverse: options.InverseOption = "eigen",
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Samples of one rank.")] = 16,
    sample: Annotated[
        str | None,
        typer.Option(
            metavar="SHAPE", help="Of one input, such as 3,32,32, for a network that has no name."
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(metavar="N", min=1, help="Of training, all of them recorded.")
    ] = 4,
    update_every: options.UpdateOption = 1,
    refresh_every: options.RefreshOption = 2,
    bucket: Annotated[
        str,
        typer.Option(
            metavar="BYTES",
            help="Factors leave in exchanges of about this size, as soon as their layers are done.",
        ),
    ] = "256KiB",
    threads: Annotated[int, typer.Option(metavar="N", min=1, help="Of each process.")] = 1,
    file: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="FILE", help="Write what every rank did, for ui.perfetto.dev."
        ),
    ] = None,
    ops: Annotated[
        bool, typer.Option("--ops", help="With all operations of rank 0, by torch.profiler.")
    ] = False,
) -> None:
    """Train on random data for a few steps, and show which messages ran under the backward pass.

    Every rank is a process of this machine on the CPU, connected to the others by gloo. The trace
    opens in ui.perfetto.dev or chrome://tracing: one process for each rank, with every message
    from its launch to its arrival.

    natgrad bench --network resnet20 --placement comm --trace trace.json
    """
    found = options.network(network)
    shape = found.sample if sample is None else options.shape(sample)
    if shape is None:
        raise SettingError(
            f"Network {network!r} does not say what its inputs are: pass the shape of one of them, "
            "such as --sample 3,32,32."
        )
    if ops and file is None:
        raise SettingError("--ops adds to a trace but there is none: pass --trace FILE, too.")
    if file is not None and not file.absolute().parent.is_dir():
        raise SettingError(
            f"--trace is {file} but there is no folder {file.parent}: make it, or name a file "
            "elsewhere."
        )
    job = BenchJob(
        network,
        (batch, *shape),
        options.placement(placement, fraction),
        layout,
        inverse,
        (update_every, refresh_every),
        options.size(bucket, "--bucket"),
        steps,
        ops,
    )
    with terminal.status(f"Training {network} on {ranks} rank{'' if ranks == 1 else 's'}"):
        records = launch.run(measure, job, ranks=ranks, threads=threads)
    typer.echo(spans_table(job, records))
    if ranks > 1:
        typer.echo(f"\n{flights_table(records)}")
    if file is not None:
        about = {"network": network, "plan": records[0].plan, "torch": torch.__version__}
        trace.write(file, records, about)
        typer.echo(f"\nThe trace is in {file}: open it in ui.perfetto.dev.")


@dataclass(frozen=True)
class BenchJob:
    """What the ranks are told to do."""

    network: str
    inputs: tuple[int, ...]
    placement: Placement
    layout: Layout
    inverse: str
    intervals: tuple[int, int]  # update, refresh
    bucket: int
    steps: int
    ops: bool = False


def measure(job: BenchJob) -> Record:
    """On one rank: train, and note everything."""
    comm = Recording(ProcessGroups())
    torch.manual_seed(0)
    model = _laid_out(options.network(job.network)(), job.layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    kfac = KFAC(
        model,
        optimizer,
        inverse=INVERSES[job.inverse](),
        update_every=job.intervals[0],
        refresh_every=job.intervals[1],
        distributed=Distributed(job.placement, comm, bucket_bytes=job.bucket),
    )
    watch = SpanStopwatch()
    kfac.time_with(watch)
    torch.manual_seed(1 + comm.rank)
    inputs = torch.randn(job.inputs)
    with Profile(job.ops and comm.rank == 0) as profile:
        for step in range(job.steps):
            watch.step = step
            with watch("step"):
                optimizer.zero_grad()
                with watch("forward"):
                    # Any output is taken for the logits of some classes.
                    logits = model(inputs).flatten(1)
                    loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
                with watch("backward"):
                    loss.backward()
                with watch("kfac.step"):
                    kfac.step()
                with watch("optimizer.step"):
                    optimizer.step()
    return Record(comm.rank, kfac.plan.strategy, watch.spans, comm.messages, profile.ops)


def _laid_out(model: nn.Module, layout: Layout) -> nn.Module:
    match layout:
        case Layout.DDP:
            return nn.parallel.DistributedDataParallel(model)
        case Layout.FSDP:
            return launch.shard(model)
        case Layout.PLAIN:
            return model


def spans_table(job: BenchJob, records: list[Record]) -> Table:
    """Where the time went, over all ranks and steps."""
    names = dict.fromkeys(span.name for record in records for span in record.spans)
    first = ("step", "forward", "backward", "kfac.step", "optimizer.step")
    rows = []
    for name in (*first, *(n for n in names if n not in first)):
        totals = [
            sum(span.end - span.start for span in record.of(name) if span.step == step) / 1e9
            for record in records
            for step in range(job.steps)
        ]
        figures = (min(totals), sum(totals) / len(totals), max(totals))
        rows.append((name, *map(seconds_text, figures)))
    columns = (Column("stage"), *(Column(c, "right") for c in ("least", "mean", "most")))
    footer = (
        f"of a rank in {job.steps} steps; A, G and norm are part of backward, fold, "
        "refresh and apply of kfac.step"
    )
    return Table(f"{job.network}, {records[0].plan}: seconds a step", columns, tuple(rows), footer)


def flights_table(records: list[Record]) -> Table:
    """What was sent for which purpose, and how much of its way was under a backward pass."""
    messages = [(record, message) for record in records for message in record.messages]
    rows = []
    for purpose in dict.fromkeys(message.purpose for _, message in messages):
        some = [(record, message) for record, message in messages if message.purpose == purpose]
        flown = sum((message.arrived or message.launched) - message.launched for _, message in some)
        hidden = sum(record.hidden(message) for record, message in some)
        waited = sum(end - begin for _, message in some for begin, end in message.waits)
        rows.append(
            (
                purpose,
                str(len(some) // len(records)),
                bytes_text(sum(message.sent for _, message in some) / len(records)),
                seconds_text(flown / len(records) / 1e9),
                f"{100 * hidden / max(1, flown):.0f}%",
                seconds_text(waited / len(records) / 1e9),
            )
        )
    names = ("messages", "sent", "under way", "under backward", "waited for")
    columns = (Column("purpose"), *(Column(name, "right") for name in names))
    footer = "of a rank, in all steps; without what DDP or FSDP send"
    return Table("Messages of K-FAC", columns, tuple(rows), footer)
