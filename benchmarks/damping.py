"""What the default damping was chosen from: `python -m benchmarks.damping`.

K-FAC before SGD with each of three dampings on the tasks of RESULTS.md, shorter: three learning
rates on one seed, and the best of them on another, whose training loss at the end is printed.
Results are kept in a folder, and `--resume` goes on with them.
"""

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.page import add_output, report
from benchmarks.timing import Row, Table
from natgrad.lab.compare import CONTENDERS, Comparison, ComparisonSetup, Contender, compare
from natgrad.lab.compare.progress_bar import shown
from natgrad.lab.compare.results import Status
from natgrad.lab.train import preset
from natgrad.lab.train.settings import Settings

DAMPINGS = (3e-3, 0.01, 0.03)
# Given in steps, so not in epochs.
TASKS = {
    "digits-autoencoder": {},
    "digits-cnn": {},
    "fashion-mnist-cnn": {"width": 16, "batch_size": 256, "steps": 150, "test_samples": 500},
    "cifar10-resnet20": {
        "steps": 60,
        "warmup": 0.1,
        "train_samples": 10_000,
        "test_samples": 300,
        "fit_samples": 500,
        "schedule": "polynomial",
        "decay_at": (),
        "evaluate_every": 20,
    },
    "gpt-shakespeare": {
        "context": 64,
        "width": 64,
        "layers": 2,
        "heads": 4,
        "batch_size": 32,
        "steps": 100,
        "train_samples": 8000,
        "test_samples": 100,
        "fit_samples": 300,
        "evaluate_every": 20,
    },
    "unet": {"image": 64, "width": 8, "batch_size": 4, "steps": 100},
}


def settings(task: str) -> Settings:
    own = dict(TASKS[task])
    return preset(task, **({**own, "epochs": 0.0} if "steps" in own else own))


def contenders() -> tuple[Contender, ...]:
    usual = CONTENDERS["kfac"]
    return tuple(
        replace(
            usual,
            key=f"damping-{damping:g}".replace(".", "-"),
            name=f"damping {damping:g}",
            settings={**usual.settings, "damping": damping},
        )
        for damping in DAMPINGS
    )


def rows(task: str, found: Comparison) -> list[Row]:
    """A run without a result, as it diverged or failed, has its status for a note."""
    made = []
    for one in found.entries:
        run = one.runs[0]
        done = run.status is Status.DONE and run.final is not None
        note = f"{run.lr:g}" if done else f"{run.lr:g}, {run.status.value}"
        made.append(Row(f"{task}, {one.name}", run.final if done else math.nan, note=note))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("damping"), help="folder of the runs")
    parser.add_argument("--resume", action="store_true", help="go on with what is there")
    add_output(parser)
    arguments = parser.parse_args()
    table = Table("Training loss at the end, another seed", note_name="learning rate")
    for task in arguments.tasks:
        setup = ComparisonSetup(
            settings(task), contenders(), trials=3, seeds=1, threads=arguments.threads
        )
        tell = shown(lambda text: print(text, file=sys.stderr, flush=True))
        found = compare(setup, arguments.out / task, tell, resume=arguments.resume)
        table.rows += rows(task, found)
    report([table], arguments)


if __name__ == "__main__":
    main()
