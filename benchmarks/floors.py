"""What the floor of `natgrad.Spectral` was chosen from: `python -m benchmarks.floors`.

Singular values of a whitened gradient that are smaller than the floor, a share of their root mean
square, do not become 1. Each floor trains six tasks with NaturalMuon at one learning rate, on
several seeds; printed is the training loss at the end (of a fixed part of the training data), its
mean over the seeds, and by how much seeds differ. Nothing is timed, so that it may run beside
other work. Finished runs are kept in a file, and not done again.
"""

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import torch

import natgrad
from benchmarks.comparison_tasks import TASKS
from benchmarks.timing import machine, render
from natgrad.comm import Alone
from natgrad.lab.train.settings import Settings
from natgrad.lab.train.training import Training

FLOORS = (0.002, 0.01, 0.025, 0.05, 0.1)
# Of `benchmarks.comparison`, cut to so many steps.
STEPS = {
    "mnist-deep-autoencoder": 60,
    "autoencoder-128": 100,
    "digits-128": 100,
    "fashion-256": 100,
    "gpt-32": 100,
    "unet-4": 60,
}
SAMPLES = 512  # that the loss at the end is of; a U-Net's data set is smaller


def settings(task: str, lr: float, seed: int) -> Settings:
    """``task``: one of `STEPS`; ``lr``: its schedule falls from it."""
    found = TASKS[task].task()
    steps = min(STEPS[task], found.steps or STEPS[task])
    own = {
        "epochs": 0.0,
        "steps": steps,
        "fit_samples": min(SAMPLES, found.train_samples or SAMPLES),
    }
    return replace(found, optimizer="naturalmuon", kfac=False, lr=lr, seed=seed, **own)


def train(asked: Settings, floor: float) -> float:
    """The training loss at the end."""
    training = Training(asked, Alone(), torch.device("cpu"))
    training.optimizer = natgrad.NaturalMuon(
        training.network, asked.lr, geometry=natgrad.Spectral(floor=floor)
    )
    for step, batches in training.batches(0):
        training.step(step, batches)
    return training.fit()["loss"]


def cell(losses: list[float]) -> str:
    """The mean, and half the distance between the ends."""
    spread = (max(losses) - min(losses)) / 2
    return f"{statistics.fmean(losses):.4g} ± {spread:.1g}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--floors", nargs="+", type=float, default=list(FLOORS))
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("floors.json"), help="finished runs")
    parser.add_argument("--markdown", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    known: dict[str, float] = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    print(", ".join(f"{key}: {value}" for key, value in machine().items()))
    rows = []
    for task in asked.tasks:
        found: dict[float, list[float]] = {floor: [] for floor in asked.floors}
        for seed in range(asked.seeds):
            for floor, losses in found.items():
                key = f"{task}, {STEPS[task]} steps, lr {asked.lr:g}, floor {floor:g}, seed {seed}"
                if key not in known:
                    known[key] = train(settings(task, asked.lr, seed), floor)
                    asked.out.write_text(json.dumps(known, indent=1))
                    print(f"{key}: {known[key]:.4g}", file=sys.stderr, flush=True)
                losses.append(known[key])
        rows.append([f"{task}, {STEPS[task]} steps", *map(cell, found.values())])
    title = f"Training loss at the end by floor, lr {asked.lr:g}, {asked.seeds} seeds"
    print(render(title, ["task", *(f"{floor:g}" for floor in asked.floors)], rows, asked.markdown))


if __name__ == "__main__":
    main()
