"""What the simulator predicts of K-FAC, beside what it takes: `python -m benchmarks.predicted`.

For each number of ranks, the computer is measured on that many processes (as `natgrad plan
--calibrate` does); then K-FAC under every placement trains on as many, in turn and in step, as in
`benchmarks.distributed`. A step takes as long as its slowest rank, and the least of several counts.

    predicted = a step of DDP alone + statistics + what `simulate` says of K-FAC

    stale    apply                        from the measured costs and links, for the plan that the
    update   apply + update               ranks have executed
    both     apply + update + refresh

DDP's step, and the statistics of a batch, which are taken during the backward pass and are the same
under every placement, are as measured beside it. `ReduceScatter`, which trains without DDP, has
the seconds of DDP's all-reduce taken off. *Own* is what a rank spends in `kfac.step()`, by its own
stopwatch: where ranks share cores, most of it is waiting for those that are not there yet.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.distributed import processes, slowest
from benchmarks.page import add_output, report
from benchmarks.ranks import (
    DDP,
    KINDS,
    NETWORKS,
    PLACEMENTS,
    STATISTICS,
    STEP,
    Measured,
    Setting,
    kept,
    measure,
)
from benchmarks.timing import Row, Table, render
from natgrad.comm import connect, launch
from natgrad.lab.calibration import CalibrationSettings, calibrate
from natgrad.placement import MeasuredCluster, simulate
from natgrad.tables import bytes_text

CLOCKS = {"stale": ("apply",), "update": ("apply", "update")}
ALL = ("apply", "update", "refresh")
QUICK = CalibrationSettings(
    (2, 32, 128), (1 << 12, 1 << 18), rounds=2, round_seconds=1e-3, layers=8, width=128
)


@dataclass(frozen=True)
class Prediction(Row):
    """One placement and kind of step; `figure` is the ratio of predicted to measured."""

    kind: str = ""
    predicted: float = 0.0  # milliseconds, as all that follow
    measured: float = 0.0
    kfac: float = 0.0
    own: float = 0.0
    statistics: float = 0.0
    planned: int = 0  # bytes on the rank with most
    memory: int = 0

    def cells(self) -> tuple[str, ...]:  # type: ignore[override]
        before, after = (self.predicted, self.measured), (self.kfac, self.own, self.statistics)
        shown = [[f"{t:.3g}" for t in times] for times in (before, after)]
        texts = (*shown[0], f"{self.figure:.2f}x", *shown[1])
        return self.name, self.kind, *texts, bytes_text(self.planned), bytes_text(self.memory)


HEADER = (
    *("what", "step", "predicted ms", "measured ms", "ratio"),
    *("K-FAC predicted", "own", "statistics", "planned", "kept"),
)


@dataclass
class Side(Table):
    """Predictions under a title and over a note."""

    note: str = ""

    def render(self, markdown: bool = False) -> str:
        rows = [row.cells() for row in self.rows]
        return f"{render(self.title, HEADER, rows, markdown)}\n{self.note}\n"


def best(results: Sequence[Measured], name: str, kind: str, stages: Sequence[str]) -> float:
    """Seconds of these stages in the fastest step, at its slowest rank."""
    spent = (
        [sum(step.get(stage, 0.0) for stage in stages) for step in one.stages[name][kind]]
        for one in results
    )
    return min(map(max, zip(*spent, strict=True)))


def predictions(
    setting: Setting, results: Sequence[Measured], machine: MeasuredCluster
) -> list[Prediction]:
    """A row for every placement and kind of step."""
    ranks = len(results)
    # All steps of DDP are alike.
    plain = min(min(slowest(results, DDP, kind)) for kind in KINDS)
    found = []
    for name in setting.placements:
        plan = results[0].plan[name]
        times = simulate(plan, machine.cluster, machine.cost)
        for kind in ("stale", "update", "both"):
            own, statistics = (best(results, name, kind, some) for some in (STEP, STATISTICS))
            kfac = sum(max(getattr(times, clock)) for clock in CLOCKS.get(kind, ALL))
            measured = min(slowest(results, name, kind))
            predicted = plain + statistics + kfac
            if name == "ReduceScatter()":  # which sums gradients itself
                predicted -= machine.cluster.all_reduce(4 * results[0].parameters, ranks)
            found.append(
                Prediction(
                    f"{setting.network}, {ranks} rank{'' if ranks == 1 else 's'}: {name}",
                    predicted / measured,
                    "x",
                    kind=kind,
                    predicted=1e3 * predicted,
                    measured=1e3 * measured,
                    kfac=1e3 * kfac,
                    own=1e3 * own,
                    statistics=1e3 * statistics,
                    planned=max(kept(plan, rank) for rank in plan.world.ranks),
                    memory=max(one.memory[name] for one in results),
                )
            )
    return found


def calibrated(settings: CalibrationSettings) -> MeasuredCluster:
    """On one of the ranks of the default group."""
    return calibrate(connect(), torch.device("cpu"), settings)


def compared(
    networks: Sequence[str],
    ranks: Sequence[int],
    placements: Sequence[str],
    batch: int,
    repeats: int,
    settings: CalibrationSettings,
) -> list[Table]:
    tables: list[Table] = []
    for size in ranks:
        print(f"measuring {size} processes", file=sys.stderr, flush=True)
        machine = launch.run(calibrated, settings, ranks=size, threads=1)[0]
        cluster = machine.cluster
        table = Side(
            f"K-FAC on {size} rank{'' if size == 1 else 's'}: predicted and measured",
            note=f"Measured: {cluster.flops:.3g} flop/s"
            + (
                f", {cluster.bandwidth:.3g} B/s, latency {1e6 * cluster.latency:.3g} µs, largest "
                f"error of the fitted links {100 * machine.residual:.0f}%. "
                if size > 1
                else ". "
            )
            + processes([size], batch),
        )
        for network in networks:
            print(f"{network} on {size}: {repeats} rounds", file=sys.stderr, flush=True)
            setting = Setting(network, batch, repeats, tuple(placements))
            results = launch.run(measure, setting, ranks=size, threads=1)
            table.rows += predictions(setting, results, machine)
        tables.append(table)
    return tables


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = ["resnet32", "small-transformer"]
    parser.add_argument("--models", nargs="+", choices=NETWORKS, default=usual)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--placements", nargs="+", choices=PLACEMENTS, default=list(PLACEMENTS))
    parser.add_argument("--batch", type=int, default=16, help="of one rank (default 16)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds (default 5)")
    parser.add_argument("--quick", action="store_true", help="measure few sizes, and hastily")
    add_output(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # as the ranks do; nothing is computed here
    tables = compared(
        arguments.models,
        arguments.ranks,
        arguments.placements,
        arguments.batch,
        arguments.repeats,
        QUICK if arguments.quick else CalibrationSettings(),
    )
    report(tables, arguments)


if __name__ == "__main__":
    main()
