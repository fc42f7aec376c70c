"""K-FAC beside SGD and AdamW on 1,797 real handwritten digits; ends in a table and a page.

Each optimizer gets as many learning rates to choose from as the others, is tuned on one seed by the
geometric mean of the training loss over the run, and is then run anew on other seeds. All three see
the same initial weights and the same batches, and their learning rates fall linearly to zero.
"""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import natgrad
from digits_page import write_page
from natgrad.tables import Column, Table, seconds_text

BATCH = 256
EVALUATE_EVERY = 10


@dataclass(frozen=True)
class Task:
    name: str
    about: str
    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor, Tensor], Tensor]  # (output, images, labels) -> scalar
    classifies: bool


@dataclass(frozen=True)
class Method:
    name: str
    about: str
    optimizer: Callable[[nn.Module, float], torch.optim.Optimizer]
    learning_rates: tuple[float, ...]
    preconditioned: bool = False


@dataclass
class Run:
    """One training; seconds count training alone, not the evaluations in between."""

    lr: float
    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # over the whole training set
    test_loss: float = math.inf
    test_accuracy: float = 0.0

    @property
    def final(self) -> float:
        return self.losses[-1] if math.isfinite(self.losses[-1]) else math.inf

    @property
    def mean_log_loss(self) -> float:
        """What learning rates are chosen by: low early and low at the end both count."""
        if not math.isfinite(self.final):
            return math.inf
        return statistics.mean(math.log(max(loss, 1e-12)) for loss in self.losses)

    def reached(self, loss: float) -> tuple[float, float]:
        """Steps and seconds until the training loss was first as low as that."""
        for step, seconds, found in zip(self.steps, self.seconds, self.losses, strict=True):
            if found <= loss:
                return step, seconds
        return math.inf, math.inf


def autoencoder() -> nn.Module:
    sizes = (64, 128, 64, 32, 12, 32, 64, 128, 64)
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(sizes):
        linear = nn.Linear(inputs, outputs)
        nn.init.xavier_normal_(linear.weight)  # as is usual before tanh; all optimizers need it
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def classifier() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def reconstruction_loss(output: Tensor, images: Tensor, labels: Tensor) -> Tensor:
    """Binary cross-entropy, summed over the pixels of a digit and averaged over digits."""
    total = F.binary_cross_entropy_with_logits(output, images.flatten(1), reduction="sum")
    return total / len(images)


TASKS = (
    Task(
        "autoencoder",
        "64-128-64-32-12-32-64-128-64 with tanh, cross-entropy summed over the 64 pixels",
        autoencoder,
        reconstruction_loss,
        classifies=False,
    ),
    Task(
        "classifier",
        "three 3×3 convolutions and a linear layer with ReLU, cross-entropy over 10 classes",
        classifier,
        lambda output, images, labels: F.cross_entropy(output, labels),
        classifies=True,
    ),
)


def sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)


SMALL_RATES = (0.1, 0.03, 0.01, 0.003, 0.001)
METHODS = (
    Method("SGD", "momentum 0.9", sgd, (1.0, 0.3, 0.1, 0.03, 0.01)),
    Method("AdamW", "no weight decay", adamw, SMALL_RATES),
    Method("K-FAC", "before SGD, momentum 0.9", sgd, SMALL_RATES, preconditioned=True),
)


@dataclass(frozen=True)
class Digits:
    images: Tensor  # [n, 1, 8, 8], in [0, 1]
    labels: Tensor  # [n]

    @classmethod
    def split(cls) -> tuple["Digits", "Digits"]:
        """1,437 digits to train on and 360 to test on, the same in every run."""
        data = load_digits()
        images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.tensor(data.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        train, test = order[:1437], order[1437:]
        return cls(images[train], labels[train]), cls(images[test], labels[test])

    def batches(self, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            order = torch.randperm(len(self.labels), generator=generator)
            for rows in order[: len(order) // BATCH * BATCH].split(BATCH):
                yield self.images[rows], self.labels[rows]


@torch.no_grad()
def evaluate(task: Task, model: nn.Module, data: Digits) -> tuple[float, float]:
    output = model(data.images)
    right = (output.argmax(1) == data.labels).float().mean() if task.classifies else math.nan
    return float(task.loss(output, data.images, data.labels)), float(right)


def train(
    task: Task, method: Method, lr: float, steps: int, seed: int, data: tuple[Digits, Digits]
) -> Run:
    torch.manual_seed(seed)
    model = task.model()
    optimizer = method.optimizer(model, lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    kfac = natgrad.KFAC(model, optimizer) if method.preconditioned else None
    batches = data[0].batches(torch.Generator().manual_seed(seed))
    run = Run(lr)
    spent = 0.0
    for step in range(steps + 1):
        if step % EVALUATE_EVERY == 0 or step == steps:
            model.eval()
            run.steps.append(step)
            run.seconds.append(spent)
            run.losses.append(evaluate(task, model, data[0])[0])
            model.train()
        if step == steps or not math.isfinite(run.losses[-1]):
            break
        start = time.perf_counter()
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = task.loss(model(images), images, labels)
        loss.backward()
        if kfac is not None:
            kfac.step()
        optimizer.step()
        schedule.step()
        spent += time.perf_counter() - start
    run.test_loss, run.test_accuracy = evaluate(task, model.eval(), data[1])
    return run


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A function to call with the name of each run as it starts; a bar in a terminal with rich."""
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        interactive = False
    else:
        interactive = Console().is_terminal
    if interactive:
        with Progress(transient=True) as bar:
            job = bar.add_task("", total=total)
            started = iter(range(total))
            yield lambda name: bar.update(job, description=name, completed=next(started))
    else:
        count = iter(range(1, total + 1))
        yield lambda name: print(f"[{next(count):2d}/{total}] {name}", flush=True)


def summary(task: Task, runs: dict[str, list[Run]]) -> Table:
    """One row an optimizer: means over seeds, and the median way to SGD's loss on the same seed."""
    rows = []
    for name, found in runs.items():
        ways = [run.reached(sgd.final) for run, sgd in zip(found, runs["SGD"], strict=True)]
        steps, seconds = sorted(ways)[len(ways) // 2]
        total = statistics.mean(run.seconds[-1] for run in found)
        row = [
            name,
            f"{found[0].lr:g}",
            f"{statistics.mean(run.final for run in found):.3g}",
            f"{statistics.mean(run.test_loss for run in found):.3g}",
            seconds_text(total / found[0].steps[-1]),
            seconds_text(total),
            f"{steps} steps, {seconds_text(seconds)}" if math.isfinite(steps) else "never",
        ]
        if task.classifies:
            row.insert(4, f"{statistics.mean(run.test_accuracy for run in found):.1%}")
        rows.append(tuple(row))
    names = ["optimizer", "lr", "train loss", "test loss", "a step", "in all", "to SGD's loss"]
    if task.classifies:
        names.insert(4, "test accuracy")
    columns = tuple(Column(name, "left" if name == "optimizer" else "right") for name in names)
    return Table(f"{task.name}: {task.about}", columns, tuple(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="training steps of a run")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each tuned optimizer")
    parser.add_argument("--seed", type=int, default=1, help="the first of these seeds")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder of the page")
    args = parser.parse_args()
    torch.set_num_threads(1)  # matrices this small gain nothing from a second thread
    start = time.perf_counter()
    data = Digits.split()
    results: dict[Task, dict[str, list[Run]]] = {}
    total = len(TASKS) * sum(len(method.learning_rates) + args.seeds for method in METHODS)
    with progress(total) as announce:
        for task in TASKS:
            results[task] = {}
            for method in METHODS:
                trials = []
                for lr in method.learning_rates:
                    announce(f"{task.name}: {method.name}, trying learning rate {lr:g}")
                    trials.append(train(task, method, lr, args.steps, args.seed - 1, data))
                best = min(trials, key=lambda run: run.mean_log_loss).lr
                results[task][method.name] = []
                for seed in range(args.seed, args.seed + args.seeds):
                    announce(f"{task.name}: {method.name}, learning rate {best:g}, seed {seed}")
                    run = train(task, method, best, args.steps, seed, data)
                    results[task][method.name].append(run)
    tables = {task: summary(task, runs) for task, runs in results.items()}
    for table in tables.values():
        print(f"\n{table}")
    settings = {
        "data": "1,797 handwritten digits of 8×8 pixels (scikit-learn): 1,437 train, 360 test",
        "a run": f"{args.steps} steps of {BATCH} digits, learning rate falling linearly to 0",
        **{
            method.name: f"{method.about}; learning rates tried: "
            + ", ".join(f"{lr:g}" for lr in method.learning_rates)
            for method in METHODS
        },
        "K-FAC settings": "all at their defaults, natgrad.KFAC(model, optimizer)",
        "chosen": "the learning rate with the lowest geometric mean of the training loss over a "
        "run, on one more seed",
        "shown": f"means over {args.seeds} seeds; to SGD's loss: the median way to the loss "
        "at which SGD ended on the same seed, looked at every "
        f"{EVALUATE_EVERY} steps; seconds are those of training alone",
    }
    page = write_page(args.out, results, tables, settings)
    print(f"\n{seconds_text(time.perf_counter() - start)} in all; the curves are in {page}")


if __name__ == "__main__":
    main()
