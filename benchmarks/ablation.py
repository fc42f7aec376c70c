"""What each default of NaturalMuon is worth: `python -m benchmarks.ablation`.

One choice at a time is changed, and every variant gets what the default gets: the same tasks, five
learning rates on one seed, three other seeds with the best. Results are kept in
`benchmarks/results/ablation-TASK`, and the command goes on with what is there. It writes
`docs/ablation.md` and its picture from them; `--table` does that alone. On one idle core it takes
an hour.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.ablation_variants import VARIANTS, Variant
from benchmarks.comparison import HERE, note, small, stop_after
from benchmarks.timing import machine
from natgrad.lab.compare import Comparison, ComparisonSetup, compare
from natgrad.lab.compare.progress_bar import shown
from natgrad.lab.compare.results import NAME, ContenderResult
from natgrad.lab.compare.summary import number_text, rate_text, steps_to, whole
from natgrad.lab.train import preset
from natgrad.lab.train.state import write_text

TRIALS, SEEDS = 5, 3


@dataclass(frozen=True)
class AblationTask:
    """``target``: with one, steps to it are compared, otherwise the training loss at the end."""

    title: str
    preset: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    target: float | None = None

    def setup(self, variants: Mapping[str, Variant], threads: int) -> ComparisonSetup:
        length: dict[str, Any] = {"epochs": 0.0} if "steps" in self.settings else {}
        task = preset(self.preset, weight_decay=0.0, **length, **self.settings)
        contenders = tuple(one.contender(name) for name, one in variants.items())
        return ComparisonSetup(
            task,
            contenders,
            trials=TRIALS,
            seeds=SEEDS,
            target=self.target,
            threads=threads,
            name=self.title,
        )


TASKS = {
    "autoencoder": AblationTask(
        "Autoencoder of digits, 300 steps of 128: loss",
        "digits-autoencoder",
        {"batch_size": 128, "evaluate_every": 10},
    ),
    "digits": AblationTask(
        "Digits, convnet, 200 steps of 128: steps to a loss of 0.001",
        "digits-cnn",
        {"batch_size": 128, "evaluate_every": 4},
        target=1e-3,
    ),
    "gpt": AblationTask(
        "GPT of two layers, 150 steps of 32: loss",
        "gpt-shakespeare",
        {
            "context": 64,
            "width": 64,
            "layers": 2,
            "heads": 4,
            "batch_size": 32,
            "steps": 150,
            "train_samples": 8000,
            "test_samples": 200,
            "fit_samples": 300,
            "warmup": 0.0,
            "warmup_share": 0.05,
            "evaluate_every": 15,
        },
    ),
}


def key(name: str) -> str:
    return VARIANTS[name].contender(name).key


def values(task: AblationTask, entry: ContenderResult) -> list[float]:
    """Of all seeds, the lower the better; infinite where one did not get there."""
    if task.target is not None:
        there = [float(run.reached.step) for run in entry.runs if run.reached]
    else:
        there = [run.final for run in entry.runs if run.final is not None]
    return there + [float("inf")] * (len(entry.runs) - len(there))


def cell(task: AblationTask, found: Comparison, entry: ContenderResult | None) -> str:
    if entry is None or not entry.runs:
        return "–"
    if task.target is not None:
        return f"{steps_to(entry).text(whole)} ({rate_text(entry)})"
    seen = [value for value in values(task, entry) if value < float("inf")]
    if not seen:
        return "never"
    shown = [number_text(found.measure.metric, one) for one in (median(seen), min(seen), max(seen))]
    lost = f", {len(seen)} of {len(entry.runs)} end" if len(seen) < len(entry.runs) else ""
    return f"{shown[0]} ({shown[1]}–{shown[2]}){lost} ({rate_text(entry)})"


def read(folder: Path) -> dict[str, Comparison]:
    files = {name: folder / f"ablation-{name}" / NAME for name in TASKS}
    return {name: Comparison.read(file) for name, file in files.items() if file.exists()}


def entry_of(found: Comparison, name: str) -> ContenderResult | None:
    return next((one for one in found.entries if one.key == key(name)), None)


def table(found: Mapping[str, Comparison]) -> str:
    titles = [TASKS[name].title for name in found]
    lines = [["what is changed", "to", *titles], ["---", "---", *["---:"] * len(titles)]]
    for name, one in VARIANTS.items():
        cells = [cell(TASKS[t], seen, entry_of(seen, name)) for t, seen in found.items()]
        lines.append([one.factor, one.value, *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def relative(found: Mapping[str, Comparison], name: str, task: str) -> list[float]:
    """Every seed's value over the default's median; nothing where that is not there."""
    usual, entry = (entry_of(found[task], one) for one in ("DEFAULT", name))
    if usual is None or entry is None or not usual.runs or not entry.runs:
        return []
    base = median(values(TASKS[task], usual))
    return [value / base for value in values(TASKS[task], entry)] if base < float("inf") else []


def draw(found: Mapping[str, Comparison], path: Path) -> None:
    """Points right of 1 are worse than the default; a cross at the edge did not get there."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.26 * len(VARIANTS) + 1), layout="constrained")
    axes = figure.subplots()
    names, edge = list(VARIANTS), 2.0
    for place, (task, colour) in enumerate(
        zip(found, ("#0072b2", "#d55e00", "#009e73"), strict=False)
    ):
        for row, name in enumerate(names):
            seen, y = relative(found, name, task), row + 0.22 * (place - 1)
            finite = [min(value, edge) for value in seen if value < float("inf")]
            axes.plot(finite, [y] * len(finite), "-", color=colour, linewidth=1)
            if finite:
                label = TASKS[task].title if row == 0 else None
                axes.plot(median(finite), y, "o", color=colour, markersize=4, label=label)
            if len(finite) < len(seen):
                axes.plot(edge, y, "x", color=colour, markersize=5)
    axes.axvline(1, color="#888888", linewidth=0.8)
    axes.set_yticks(range(len(names)), [VARIANTS[name].title for name in names], fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0.7, edge * 1.02)
    axes.set_xlabel("relative to the default (median of its seeds); the lower the better")
    axes.legend(fontsize=7, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def page(found: Mapping[str, Comparison], picture: str) -> str:
    facts = machine()
    return "\n".join(
        [
            "# What each default of NaturalMuon is worth",
            "",
            f"Written by `python -m benchmarks.ablation` ({facts['processor']}, torch "
            f"{facts['torch']}, commit {facts['commit']}). One choice is changed at a time; each "
            f"variant has {TRIALS} learning rates on one seed and then {SEEDS} other seeds with "
            "the best of them, which stands in brackets at the end of a cell. Medians stand "
            "before the least and the most.",
            "",
            f"![Every variant relative to the default]({picture})",
            "",
            table(found),
            "",
        ]
    )


def write(folder: Path, docs: Path) -> None:
    found = read(folder)
    if found:
        draw(found, docs / "images" / "ablation.svg")
        write_text(docs / "ablation.md", page(found, "images/ablation.svg"))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--budget-minutes", type=float, help="stop after so many")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="write the page, no runs")
    parser.add_argument("--folder", type=Path, default=HERE / "results")
    parser.add_argument("--docs", type=Path, default=HERE.parent / "docs")
    asked = parser.parse_args(argv)
    start, came = time.monotonic(), 0
    timer = None if asked.table else stop_after(asked.budget_minutes)
    for name in asked.tasks if not asked.table else ():
        left = (asked.budget_minutes or float("inf")) * 60 - (time.monotonic() - start)
        if came or left <= 0:
            break
        where = asked.folder / f"ablation-{name}"
        where.mkdir(parents=True, exist_ok=True)
        note(where)
        tell = shown(lambda text, name=name: print(f"{name} {text}", file=sys.stderr, flush=True))
        found = compare(TASKS[name].setup(VARIANTS, asked.threads), where, tell, resume=True)
        small(found).write(where)
        came = found.signal
    if timer is not None:
        timer.cancel()
    write(asked.folder, asked.docs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
