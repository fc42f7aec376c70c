"""What NaturalMuon's default intervals were chosen from: `python -m benchmarks.intervals`.

Each pair of intervals trains the digits CNN and one of 8 channels on Fashion-MNIST, by batches of
128, at one learning rate and on several seeds. Printed are steps to a training loss (of a fixed
part of the training data, measured every fourth step), the loss at the end, and how often the
curvature was measured and decomposed: the two that cost. Nothing is timed, so that it may run
beside other work.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import natgrad
from benchmarks.timing import machine, render
from natgrad.comm import Alone
from natgrad.lab.train import preset
from natgrad.lab.train.settings import Settings
from natgrad.lab.train.training import Training
from natgrad.schedules import Doubling, Drift

EVERY = 4  # steps between two looks at the training loss


@dataclass(frozen=True)
class Linear:
    """1 at first, one more after every ``slope`` steps, up to ``at_most``."""

    at_most: int
    slope: float

    def __call__(self, step: int) -> int:
        return min(self.at_most, 1 + int(step / self.slope))


INTERVALS: dict[str, tuple[Any, Any]] = {
    "1, 1": (1, 1),
    "2, 10": (2, 10),
    "4, 20": (4, 20),
    "10, 20": (10, 20),
    "10, 100": (10, 100),
    "Doubling(4), Doubling(20)": (Doubling(4), Doubling(20)),
    "Doubling(10), Doubling(20)": (Doubling(10), Doubling(20)),
    "Doubling(10), Doubling(100)": (Doubling(10), Doubling(100)),
    "1 to 10, 1 to 50 in 100 steps": (Linear(10, 10), Linear(50, 2)),
    "Doubling(4), Drift(0.1)": (Doubling(4), Drift(0.1)),
    "Doubling(4), Drift(0.3)": (Doubling(4), Drift(0.3)),
}


@dataclass(frozen=True)
class Trial:
    settings: Settings
    target: float


def trials(lr: float) -> dict[str, Trial]:
    common = {"optimizer": "naturalmuon", "kfac": False, "lr": lr, "fit_samples": 512}
    fashion = {"width": 8, "batch_size": 128, "steps": 234, "epochs": 0.0, "test_samples": 500}
    return {
        "digits-cnn": Trial(preset("digits-cnn", **common), 0.01),
        "fashion-mnist-cnn": Trial(preset("fashion-mnist-cnn", **common, **fashion), 0.4),
    }


@dataclass(frozen=True)
class Curve:
    """``losses[i]`` after ``EVERY * (i + 1)`` steps; how many steps updated and decomposed."""

    losses: list[float]
    updates: int
    refreshes: float

    def steps_to(self, target: float) -> float:
        found = (EVERY * (i + 1) for i, loss in enumerate(self.losses) if loss <= target)
        return next(found, float("inf"))


def train(settings: Settings, update_every: Any, refresh_every: Any) -> Curve:
    """One run. A refresh counts by the share of the blocks that it decomposed."""
    training = Training(settings, Alone(), torch.device("cpu"))
    optimizer = natgrad.NaturalMuon(
        training.network, settings.lr, update_every=update_every, refresh_every=refresh_every
    )
    training.optimizer = optimizer
    blocks = optimizer.kfac.blocks
    losses, updates, refreshes = [], 0, 0.0
    for step, batches in training.batches(0):
        updates += bool(optimizer.kfac.statistics.due)
        before = [block.version for block in blocks]
        training.step(step, batches)
        changed = sum(b.version != old for b, old in zip(blocks, before, strict=True))
        refreshes += changed / len(blocks)
        if (step + 1) % EVERY == 0:
            losses.append(training.fit()["loss"])
    return Curve(losses, updates, refreshes)


def table(task: str, trial: Trial, found: dict[str, list[Curve]], markdown: bool) -> str:
    """A row for each pair of intervals."""
    rows = []
    for name, curves in found.items():
        steps = sorted(curve.steps_to(trial.target) for curve in curves)
        last = [curve.losses[-1] for curve in curves]
        rows.append(
            [
                name,
                f"{statistics.median(steps):g} ({steps[0]:g} to {steps[-1]:g})",
                f"{statistics.mean(last):.3g}",
                f"{statistics.mean(c.updates for c in curves):.0f}",
                f"{statistics.mean(c.refreshes for c in curves):.0f}",
            ]
        )
    header = ["update, refresh", f"steps to {trial.target:g}", "at the end", "updates", "refreshes"]
    title = f"{task}, lr {trial.settings.lr:g}, {trial.settings.steps} steps"
    return render(title, header, rows, markdown)


def measured(
    trial: Trial, names: list[str], seeds: int, known: dict[str, Any], keep: Callable[[], None]
) -> dict[str, list[Curve]]:
    """Runs that are ``known`` are not done again; ``keep`` is called after each of the others."""
    found: dict[str, list[Curve]] = {name: [] for name in names}
    for seed in range(seeds):
        for name in names:
            key = f"{name}; seed {seed}"
            if key not in known:
                known[key] = vars(train(replace(trial.settings, seed=seed), *INTERVALS[name]))
                keep()
                print(f"{trial.settings.data}, {key}", file=sys.stderr, flush=True)
            found[name].append(Curve(**known[key]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tasks = list(trials(0.01))
    parser.add_argument("--tasks", nargs="+", choices=tasks, default=tasks)
    parser.add_argument("--intervals", nargs="+", choices=INTERVALS, default=list(INTERVALS))
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("intervals.json"), help="finished runs")
    parser.add_argument("--markdown", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    file = arguments.out
    runs: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    print(", ".join(f"{key}: {value}" for key, value in machine().items()))
    for task in arguments.tasks:
        trial = trials(arguments.lr)[task]
        known = runs.setdefault(f"{task}, lr {arguments.lr:g}", {})
        found = measured(
            trial,
            arguments.intervals,
            arguments.seeds,
            known,
            lambda: (file.write_text(json.dumps(runs)), None)[1],
        )
        print(table(task, trial, found, arguments.markdown))


if __name__ == "__main__":
    main()
