"""What K-FAC adds to DDP's step, by placement and ranks: `python -m benchmarks.distributed`.

For each network and number of ranks, one set of gloo processes trains with DDP alone and with K-FAC
under every placement, in turn and all ranks in step; a step takes as long as its slowest rank, and
the least of several counts. Steps of DDP are alike whatever K-FAC does beside them, so that all
ratios are to one figure, the least of all: in a small network DDP's step is a tenth of K-FAC's, and
the least of five moves by a quarter. Averages are at update/refresh intervals 10/100, put together
from the kinds of step (`timing.average_step`). Bytes are counted at the communicator and stand
beside those that the plan predicts, memory is that of factors and inverses; both are of the rank
with most.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from benchmarks.page import add_output, report
from benchmarks.ranks import (
    DDP,
    KINDS,
    NETWORKS,
    PLACEMENTS,
    USUAL,
    Measured,
    Setting,
    by_kind,
    measure,
)
from benchmarks.timing import Row, Table, average_step, render
from natgrad.comm import launch
from natgrad.tables import bytes_text


@dataclass(frozen=True)
class Line(Row):
    """The cost of one placement; `figure` is the ratio of an average step to DDP's."""

    milliseconds: float = 0.0
    stale: float = 1.0  # ratios of single kinds of step
    update: float = 1.0
    both: float = 1.0
    median: float = 1.0  # the ratio of the average step from medians
    sent: float = 0.0  # bytes of an average step, counted
    predicted: float = 0.0
    with_ddp: float = 0.0  # counted, and what DDP's all-reduce sends
    exact: bool = True  # every kind of step, rank and purpose is as predicted
    memory: int = 0
    planned: int = 0

    def cells(self) -> tuple[str, ...]:  # type: ignore[override]
        ratios = (self.figure, self.stale, self.update, self.both)
        sizes = (self.sent, self.predicted, self.with_ddp, self.memory, self.planned)
        texts = (*(f"{r:.3g}x" for r in ratios), f"{self.milliseconds:.4g}")
        return self.name, *texts, *map(bytes_text, sizes), "yes" if self.exact else "NO"


HEADER = (
    *("what", "10/100", "stale", "update", "both", "ms"),
    *("sent", "predicted", "with DDP's", "memory", "planned", "exact"),
)


@dataclass
class Wide(Table):
    """Lines under a title and over a note."""

    note: str = ""

    def render(self, markdown: bool = False) -> str:
        rows = [line.cells() for line in self.rows]
        return f"{render(self.title, HEADER, rows, markdown)}\n{self.note}\n"


def slowest(results: Sequence[Measured], name: str, kind: str) -> list[float]:
    """Seconds of each step of one kind: ranks start together, the slowest ends it."""
    return [max(times) for times in zip(*(r.seconds[name][kind] for r in results), strict=True)]


def average(by: Mapping[str, float]) -> float:
    return average_step(by, USUAL["update"], USUAL["refresh"])


def lines(setting: Setting, results: Sequence[Measured]) -> list[Line]:
    """DDP first, then every placement."""
    best, typical = (
        {
            name: {kind: pick(slowest(results, name, kind)) for kind in KINDS}
            for name in results[0].seconds
        }
        for pick in (min, statistics.median)
    )
    plain = [seconds for kind in KINDS for seconds in slowest(results, DDP, kind)]
    best[DDP] = dict.fromkeys(KINDS, min(plain))
    typical[DDP] = dict.fromkeys(KINDS, statistics.median(plain))
    ranks = len(results)
    label = f"{setting.network}, {ranks} rank{'' if ranks == 1 else 's'}"
    ring = 2 * (ranks - 1) / ranks * 4 * results[0].parameters
    found = [
        Line(f"{label}: {DDP}", 1.0, "x", milliseconds=1e3 * average(best[DDP]), with_ddp=ring)
    ]
    for name in setting.placements:
        counted = [
            average({kind: sum(r.sent[name][kind].values()) for kind in KINDS}) for r in results
        ]
        foreseen = [
            average({kind: sum(by_kind(r.predicted[name], kind).values()) for kind in KINDS})
            for r in results
        ]
        exact = all(
            r.sent[name][kind] == by_kind(r.predicted[name], kind)
            for r in results
            for kind in KINDS
        )
        plan = results[0].plan[name]
        ratio = {kind: best[name][kind] / best[DDP][kind] for kind in KINDS}
        found.append(
            Line(
                f"{label}: {plan.strategy if name == 'Auto()' else name}",
                average(best[name]) / average(best[DDP]),
                "x",
                milliseconds=1e3 * average(best[name]),
                stale=ratio["stale"],
                update=ratio["update"],
                both=ratio["both"],
                median=average(typical[name]) / average(typical[DDP]),
                sent=max(counted),
                predicted=max(foreseen),
                with_ddp=max(counted) + (0 if name == "ReduceScatter()" else ring),
                exact=exact,
                memory=max(r.memory[name] for r in results),
                planned=max(r.planned[name] for r in results),
            )
        )
    return found


def processes(ranks: Sequence[int], batch: int) -> str:
    """What a reader must know of the ranks to understand their times."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = (
        "Every rank is a process with one thread (torch.set_num_threads(1)) and a batch of "
        f"{batch}; there are {cores} cores. "
    )
    if cores and max(ranks) > cores:
        text += (
            f"More than {cores} ranks are oversubscribed: they take turns on the cores, so their "
            "times say what all ranks compute together, not how fast a cluster would be. "
        )
    return text


def note(ranks: Sequence[int], batch: int) -> str:
    return processes(ranks, batch) + (
        "'stale' steps only precondition, 'update' ones also take and reduce statistics, 'both' "
        "also decompose. 'sent' is K-FAC's own; ReduceScatter() runs without DDP and adds up the "
        "gradients itself, so they are in it."
    )


def measured(
    networks: Sequence[str],
    ranks: Sequence[int],
    placements: Sequence[str],
    batch: int,
    repeats: int,
) -> Wide:
    table = Wide(
        "Distributed K-FAC: ratio to a step of DDP, bytes and memory of the rank with most",
        note=note(ranks, batch),
    )
    for network in networks:
        setting = Setting(network, batch, repeats, tuple(placements))
        for size in ranks:
            print(f"{network} on {size}: {repeats} rounds", file=sys.stderr, flush=True)
            table.rows += lines(setting, launch.run(measure, setting, ranks=size, threads=1))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = ["resnet20", "resnet32", "mlp"]
    parser.add_argument("--models", nargs="+", choices=NETWORKS)
    parser.add_argument("--ranks", nargs="+", type=int)
    parser.add_argument("--placements", nargs="+", choices=PLACEMENTS, default=list(PLACEMENTS))
    parser.add_argument("--batch", type=int, help="of one rank (default 32)")
    parser.add_argument("--repeats", type=int, help="rounds (default 5)")
    parser.add_argument(
        "--quick", action="store_true", help="1 round of 8, without 4 ranks, ResNet-32"
    )
    add_output(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # as the ranks do; nothing is computed here
    quick = arguments.quick
    table = measured(
        arguments.models or (["resnet20", "mlp"] if quick else usual),
        arguments.ranks or ([1, 2] if quick else [1, 2, 4]),
        arguments.placements,
        arguments.batch or (8 if quick else 32),
        arguments.repeats or (1 if quick else 5),
    )
    report([table], arguments)


if __name__ == "__main__":
    main()
