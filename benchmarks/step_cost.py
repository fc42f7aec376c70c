"""What K-FAC adds to a training step, as a ratio to plain SGD: `python -m benchmarks.step_cost`.

For each network, SGD's step and three kinds of natgrad's (one that updates nothing, one that
updates the factors, one that also decomposes them) are measured in turn in one process; the
average at update/refresh intervals 1/1, 1/10 and 10/100 is put together from them
(`timing.average_step`). Beside it: the cost of every stage against a textbook K-FAC, the peak
memory over SGD's, and what an idle layer costs.
"""

import argparse
import sys
from collections.abc import Mapping

import torch

from benchmarks.idle import idle_table
from benchmarks.memory import memory_rows
from benchmarks.page import add_output, report
from benchmarks.timing import Row, Table, Times, average_step, interleave
from benchmarks.workloads import (
    INTERVALS,
    INVERSES,
    WORKLOADS,
    StageClock,
    Trainer,
    library,
    naive,
)

SCHEDULES = ((1, 1), (1, 10), (10, 100))

STEP_GOALS = {
    ("resnet32", "eigen", 10, 100): 1.06,
    ("resnet32", "cholesky", 10, 100): 1.05,
    ("resnet32", "eigen", 1, 10): 1.5,
    ("resnet32", "cholesky", 1, 10): 1.5,
    ("resnet32", "eigen", 1, 1): 1.8,
    ("resnet32", "cholesky", 1, 1): 1.6,
    ("resnet50", "eigen", 10, 100): 2.1,
    ("resnet50", "cholesky", 10, 100): 1.5,
    ("encoder", "eigen", 10, 100): 1.5,
    ("encoder", "cholesky", 10, 100): 1.3,
    ("mlp", "cholesky", 10, 100): 2.2,
}
FACTOR_GOALS = {"resnet32": 10.0, "resnet50": 4.0, "encoder": 2.0, "mlp": 3.0}
MEMORY_GOALS = {"resnet32": 60.0}


def measure(
    name: str, inverse: str, repeats: int, burst: int
) -> tuple[dict[str, Times], dict[str, StageClock]]:
    """Times of SGD's step and of each kind, and the stages of natgrad and of the textbook."""
    workload = WORKLOADS[name]
    calls = {"sgd": Trainer(workload)}
    calls |= {kind: Trainer(workload, library(kind, inverse)) for kind in INTERVALS}
    calls["naive"] = Trainer(workload, naive("both", inverse))
    clocks = {kind: StageClock(calls[kind].preconditioner) for kind in ("both", "naive")}
    after = {kind: clock.read for kind, clock in clocks.items()}
    times = interleave(calls, repeats, warmup=2, burst=burst, after=after)
    return times, clocks


def step_rows(name: str, inverse: str, times: Mapping[str, Times]) -> list[Row]:
    best = {kind: times[kind].minimum for kind in times}
    typical = {kind: times[kind].median for kind in times}
    rows = []
    for update_every, refresh_every in SCHEDULES:
        ratio = average_step(best, update_every, refresh_every) / best["sgd"]
        median = average_step(typical, update_every, refresh_every) / typical["sgd"]
        goal = STEP_GOALS.get((name, inverse, update_every, refresh_every))
        label = f"{name}, {inverse}, {update_every}/{refresh_every}"
        rows.append(Row(label, ratio, "x", goal, note=f"{median:.4g}x"))
    return rows


def kind_rows(name: str, inverse: str, times: Mapping[str, Times]) -> list[Row]:
    labels = {
        "sgd": "SGD",
        "stale": "updates nothing",
        "update": "updates",
        "both": "updates and refreshes",
        "naive": "textbook, updates and refreshes",
    }
    return [
        Row(
            f"{name}, {inverse}: {label}",
            times[kind].minimum * 1e3,
            "ms",
            note=f"{times[kind].median * 1e3:.4g} ms",
        )
        for kind, label in labels.items()
    ]


def stage_rows(name: str, inverse: str, clocks: Mapping[str, StageClock]) -> list[Row]:
    """Speed-up of each stage (`fold` moves sums into the running averages), and norm layers."""
    stages = {
        "A": ("A",),
        "G": ("G",),
        "A and G with their averages": ("A", "G", "fold"),
        "refresh": ("refresh",),
        "apply": ("apply",),
    }
    rows = []
    for label, parts in stages.items():
        ours, theirs = (clocks[which].best(*parts) for which in ("both", "naive"))
        note = f"{theirs * 1e3:.3g} -> {ours * 1e3:.3g} ms"
        goal = FACTOR_GOALS.get(name) if "fold" in parts else None
        speedup = theirs / ours if ours > 0 else float("nan")
        rows.append(Row(f"{name}, {inverse}: {label}", speedup, "x", goal, True, note))
    norm = clocks["both"].best("norm") * 1e3
    rows.append(Row(f"{name}, {inverse}: norm layers", norm, "ms", note="no rival"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--inverses", nargs="+", choices=INVERSES, default=list(INVERSES))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, help="rounds (default 12; 4 for resnet50)")
    parser.add_argument("--quick", action="store_true", help="2 rounds, without resnet50")
    parser.add_argument("--no-memory", action="store_true", help="leave peak memory out")
    add_output(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    schedules = "ratio to SGD's step, average over a cycle put together from the kinds of step"
    steps = Table(f"Cost of a step: {schedules}", note_name="from medians")
    kinds = Table("Single steps (least, and median)", note_name="median")
    stages = Table("Stages: how much faster than a textbook K-FAC", note_name="textbook -> natgrad")
    memory = Table("Peak memory over SGD's")
    for name in arguments.models:
        if arguments.quick and name == "resnet50":
            continue
        large = name == "resnet50"
        repeats = arguments.repeats or (2 if arguments.quick else 4 if large else 12)
        for inverse in arguments.inverses:
            print(f"{name}, {inverse}: {repeats} rounds", file=sys.stderr, flush=True)
            times, clocks = measure(name, inverse, repeats, burst=1 if large else 2)
            steps.rows += step_rows(name, inverse, times)
            kinds.rows += kind_rows(name, inverse, times)
            stages.rows += stage_rows(name, inverse, clocks)
            del times, clocks
        if not arguments.no_memory and name in ("resnet32", "resnet50"):
            tries = 1 if arguments.quick or large else 3
            goal = MEMORY_GOALS.get(name)
            memory.rows += memory_rows(name, "eigen", arguments.threads, tries, goal)
    idle = idle_table(repeats=20 if arguments.quick else 200)
    tables = [table for table in (steps, kinds, stages, memory, idle) if table.rows]
    report(tables, arguments)


if __name__ == "__main__":
    main()
