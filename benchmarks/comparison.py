"""NaturalMuon beside the others on sixteen tasks: `python -m benchmarks.comparison`.

Every task is a comparison as `natgrad compare` makes it (docs/compare.md). It is kept in
`benchmarks/results/TASK` (`results.json`, `comparison.toml`; single runs beside them are not
committed), and the command goes on with what is there: after an interruption, on another day, on
another machine with the same files. It writes what has been found so far between two marks of
`benchmarks/RESULTS.md`.

    python -m benchmarks.comparison --budget-minutes 480      all tasks, eight hours at most
    python -m benchmarks.comparison --tasks gpt-32 unet-4     some of them
    python -m benchmarks.comparison --rivals                  the others first, NaturalMuon later
    python -m benchmarks.comparison --cost                    seconds of a step, on an idle machine
    python -m benchmarks.comparison --table                   the tables alone

Several of these commands may run side by side on different tasks.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import comparison_table as tables
from benchmarks import page
from benchmarks.comparison_cost import costs
from benchmarks.comparison_tasks import SEEDS, TASKS, BenchmarkTask
from benchmarks.timing import machine
from natgrad.lab.compare import Comparison, ComparisonSetup, compare
from natgrad.lab.compare.progress_bar import shown
from natgrad.lab.compare.results import NAME, ComparedCurve, ComparedRun, Status
from natgrad.lab.train.state import write_text

HERE = Path(__file__).parent
MARK = "comparison"
COSTS, FACTS = "costs.json", "facts.json"


def run(name: str, setup: ComparisonSetup, folder: Path) -> int:
    """All that is left of a task; the number of the signal that ended it, or 0."""
    where = folder / name
    where.mkdir(parents=True, exist_ok=True)
    note(where)
    tell = shown(lambda text: print(f"{name} {text}", file=sys.stderr, flush=True))
    found = compare(setup, where, tell, resume=True)
    small(found).write(where)
    return found.signal


def small(found: Comparison) -> Comparison:
    """As it is committed: of trials that have ended only what they ended with, numbers of other
    curves to seven digits, and judged by these."""
    target = None if found.target is None else _digits(found.target)
    entries = [
        replace(
            one,
            trials=tuple(_end(trial).judged(found.measure, target) for trial in one.trials),
            runs=tuple(_rounded(each).judged(found.measure, target) for each in one.runs),
        )
        for one in found.entries
    ]
    return replace(found, entries=tuple(entries), target=target)


def _end(trial: ComparedRun) -> ComparedRun:
    if trial.status is Status.RUNNING or not trial.curve.steps:
        return trial
    values = {name: column[-1:] for name, column in trial.curve.values.items()}
    curve = ComparedCurve(trial.curve.steps[-1:], trial.curve.seconds[-1:], values)
    return replace(trial, curve=curve)


def _rounded(one: ComparedRun) -> ComparedRun:
    values = {name: tuple(map(_digits, column)) for name, column in one.curve.values.items()}
    seconds = tuple(map(_digits, one.curve.seconds))
    return replace(one, curve=ComparedCurve(one.curve.steps, seconds, values))


def _digits(value: float) -> float:
    return float(f"{value:.7g}")


def note(where: Path) -> None:
    """On which machines and commits it was run."""
    known = _json(where / FACTS)
    for name, value in machine().items():
        if name in ("command", "threads"):  # which the comparison has itself
            continue
        before = known.setdefault(name, [])
        if str(value) not in before:
            before.append(str(value))
    write_text(where / FACTS, json.dumps(known, indent=1) + "\n")


def measure_costs(name: str, one: BenchmarkTask, folder: Path, threads: int, rounds: int) -> None:
    where = folder / name
    where.mkdir(parents=True, exist_ok=True)
    seconds = costs(one.setup(threads), rounds)
    found = {**machine(), "seconds": seconds, "rounds": rounds, "threads": threads}
    write_text(where / COSTS, json.dumps(found, indent=1) + "\n")


def findings(name: str, one: BenchmarkTask, folder: Path) -> tables.TaskFindings | None:
    where = folder / name
    if not (where / NAME).exists():
        return None
    found, timed = Comparison.read(where), _json(where / COSTS)
    if not any(entry.runs for entry in found.entries):
        return None
    facts = "; ".join(f"{key}: {', '.join(v)}" for key, v in _json(where / FACTS).items())
    if timed:
        facts += (
            f". Seconds of a step: medians of {timed['rounds']} interleaved rounds, "
            f"{timed['threads']} thread{'s' * (timed['threads'] > 1)}, commit {timed['commit']}"
        )
    return tables.TaskFindings(one.title, found, timed.get("seconds", {}), one.left_out, facts)


def text(folder: Path) -> str:
    found = [one for name, task in TASKS.items() if (one := findings(name, task, folder))]
    if not found:
        return "Nothing has been compared yet."
    about = (
        "Written by `python -m benchmarks.comparison`. The target is the training loss with which "
        "the best of the others ends (median over its seeds), so about half of its own runs reach "
        "it. Steps and seconds are medians over seeds, with the least and the most. Because runs "
        "may have shared the machine, seconds are not those of the runs but steps times the "
        "seconds of a step, measured with all optimizers taking turns in one process "
        "(`--cost`): the median over rounds of the mean over a cycle of 20 steps."
    )
    return "\n\n".join([about, tables.overview(found), *map(tables.details, found)])


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found


def stop_after(minutes: float | None) -> threading.Timer | None:
    """SIGTERM to this process, which saves the run that is under way."""
    if minutes is None:
        return None
    timer = threading.Timer(60 * minutes, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
    return timer


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK")
    parser.add_argument("--budget-minutes", type=float, help="stop after so many")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--rivals", action="store_true", help="leave natgrad's own out of tasks that are begun"
    )
    parser.add_argument("--cost", action="store_true", help="measure seconds of a step, no runs")
    parser.add_argument("--rounds", type=int, default=5, help="of --cost")
    parser.add_argument("--table", action="store_true", help="write the tables, no runs")
    parser.add_argument("--folder", type=Path, default=HERE / "results")
    parser.add_argument("--page", type=Path, default=HERE / "RESULTS.md")
    asked = parser.parse_args(argv)
    start, came = time.monotonic(), 0
    timer = None if asked.table else stop_after(asked.budget_minutes)
    for name in asked.tasks if not asked.table else ():
        left = (asked.budget_minutes or float("inf")) * 60 - (time.monotonic() - start)
        if came or left <= 0:
            break
        if asked.cost:
            measure_costs(name, TASKS[name], asked.folder, asked.threads, asked.rounds)
        else:
            setup = TASKS[name].setup(asked.threads, asked.seeds, rivals_alone=asked.rivals)
            came = run(name, setup, asked.folder)
        page.write(asked.page, MARK, text(asked.folder))
    if timer is not None:
        timer.cancel()
    page.write(asked.page, MARK, text(asked.folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
