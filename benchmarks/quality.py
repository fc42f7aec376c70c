"""What K-FAC at its defaults does for training: `python -m benchmarks.quality`.

1. Does it turn the gradients of convolutions? ResNet-20 is trained on CIFAR-10 up to the second
   refresh; then the cosine between raw and preconditioned gradient of every convolution is
   printed. A cosine of 1 means that damping drowned the curvature and K-FAC is SGD.
   (CIFAR-10 is read in its binary version from ~/.cache/natgrad/cifar-10-batches-bin; where it
   is not there, digits of scikit-learn scaled up to 32x32 stand in, and the output says so.)
2. Is the loss lower at equal steps? An autoencoder and a small convolutional network learn 1,797
   digits for 100 steps. SGD with momentum gets the best of a grid of learning rates and momenta;
   K-FAC gets its own defaults, once in front of an untuned SGD(lr=0.1, momentum=0.9) and once with
   the best learning rate and momentum of the same grid.
"""

import argparse
import itertools
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import natgrad
from benchmarks.networks import digits_autoencoder, resnet20, small_cnn
from benchmarks.page import add_output, report
from benchmarks.timing import Row, Table

LEARNING_RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
MOMENTA = (0.0, 0.9, 0.95)
UNTUNED = (0.1, 0.9)
KFACS: dict[str, dict[str, Any]] = {
    "at its defaults": {},
    "update 1, refresh 10": {"update_every": 1, "refresh_every": 10},
}
BATCH = 128


def cifar10() -> tuple[Tensor, Tensor] | None:
    """The first 10,000 training images, standardised `[10000, 3, 32, 32]`, if they are there."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    file = cache / "natgrad" / "cifar-10-batches-bin" / "data_batch_1.bin"
    if not file.exists():
        return None
    records = torch.from_numpy(np.fromfile(file, np.uint8).reshape(-1, 3073))
    images = records[:, 1:].reshape(-1, 3, 32, 32).float() / 255
    mean, deviation = images.mean((0, 2, 3), True), images.std((0, 2, 3), keepdim=True)
    return (images - mean) / deviation, records[:, 0].long()


def digits() -> tuple[Tensor, Tensor]:
    """1,797 handwritten digits: pixels `[1797, 64]` from 0 to 1, and their classes."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    data = load_digits()
    return torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)


def large_digits() -> tuple[Tensor, Tensor]:
    """The digits as standardised colour images `[1797, 3, 32, 32]`."""
    pixels, classes = digits()
    images = F.interpolate(pixels.reshape(-1, 1, 8, 8), size=32, mode="bilinear")
    return ((images - images.mean()) / images.std()).expand(-1, 3, -1, -1).contiguous(), classes


def cosines(steps: int) -> Table:
    """Cosine between raw and preconditioned gradient of each convolution, at the last step."""
    found = cifar10()
    source = "CIFAR-10" if found else "digits scaled up to 32x32 (no CIFAR-10 here)"
    images, classes = found or large_digits()
    torch.manual_seed(0)
    model = resnet20()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    kfac = natgrad.KFAC(model, optimizer)
    convolutions = {n: m for n, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    raw: dict[str, Tensor] = {}
    for _ in range(steps):
        batch = torch.randint(len(images), (BATCH,))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[batch]), classes[batch])
        loss.backward()
        raw = {name: _gradient(layer).clone() for name, layer in convolutions.items()}
        kfac.step()
        optimizer.step()
    table = Table(f"Cosine of raw and preconditioned gradient: ResNet-20, {source}, step {steps}")
    values = []
    for name, layer in convolutions.items():
        new = _gradient(layer)
        cosine = F.cosine_similarity(raw[name].flatten(), new.flatten(), dim=0).item()
        values.append(cosine)
        shape = "x".join(map(str, layer.weight.shape))
        table.rows.append(Row(f"{name} [{shape}]", cosine))
    table.rows.append(Row("median", statistics.median(values), goal=0.9))
    table.rows.append(Row("greatest", max(values), goal=0.99))
    return table


def _gradient(layer: nn.Conv2d) -> Tensor:
    assert layer.weight.grad is not None
    return layer.weight.grad


@dataclass(frozen=True)
class Task:
    """A network, its training set, and the negative log-likelihood of a batch (a mean)."""

    name: str
    network: Callable[[], nn.Module]
    inputs: Tensor
    targets: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]


def pixel_loss(logits: Tensor, pixels: Tensor) -> Tensor:
    """Cross-entropy of pixels `[n, 64]`: summed over the pixels, mean over the images."""
    return F.binary_cross_entropy_with_logits(logits, pixels, reduction="sum") / len(pixels)


def tasks() -> list[Task]:
    pixels, classes = digits()
    images = pixels.reshape(-1, 1, 8, 8)
    return [
        Task("autoencoder", digits_autoencoder, pixels, pixels, pixel_loss),
        Task("small CNN", small_cnn, images, classes, F.cross_entropy),
    ]


def final_loss(
    task: Task,
    seed: int,
    setting: tuple[float, float],
    steps: int,
    settings: dict[str, Any] | None,
) -> float:
    """Loss over the whole training set after `steps` batches; without K-FAC for `None`."""
    torch.manual_seed(seed)
    model = task.network()
    lr, momentum = setting
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    kfac = None if settings is None else natgrad.KFAC(model, optimizer, **settings)
    for _ in range(steps):
        batch = torch.randint(len(task.inputs), (BATCH,))
        optimizer.zero_grad()
        task.loss(model(task.inputs[batch]), task.targets[batch]).backward()
        if kfac is not None:
            kfac.step()
        optimizer.step()
    with torch.no_grad():
        value = task.loss(model(task.inputs), task.targets).item()
    return value if np.isfinite(value) else float("inf")


def losses(task: Task, steps: int, seeds: int, quick: bool) -> Table:
    grid = list(itertools.product(LEARNING_RATES[2::2] if quick else LEARNING_RATES, MOMENTA))
    table = Table(
        f"{task.name}: loss after {steps} steps of {BATCH}, mean of {seeds} seeds",
        note_name="spread (least to greatest), setting",
    )

    def run(setting: tuple[float, float], settings: dict[str, Any] | None) -> list[float]:
        return [final_loss(task, seed, setting, steps, settings) for seed in range(seeds)]

    def row(
        name: str, setting: tuple[float, float], found: list[float], goal: float | None = None
    ) -> Row:
        note = f"{min(found):.4g} to {max(found):.4g}, lr {setting[0]:g}, momentum {setting[1]:g}"
        return Row(name, statistics.mean(found), goal=goal, note=note)

    def best(settings: dict[str, Any] | None) -> tuple[tuple[float, float], list[float]]:
        tried = {setting: run(setting, settings) for setting in grid}
        setting = min(tried, key=lambda key: statistics.mean(tried[key]))
        return setting, tried[setting]

    setting, found = best(None)
    limit = statistics.mean(found)
    table.rows.append(row(f"SGD, best of {len(grid)}", setting, found))
    for label, settings in KFACS.items():
        table.rows.append(row(f"K-FAC {label}", UNTUNED, run(UNTUNED, settings), limit))
        table.rows.append(row(f"K-FAC {label}, best of {len(grid)}", *best(settings), limit))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("cosine", "loss")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--steps", type=int, default=101, help="of ResNet-20 (101: two refreshes)")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="2 seeds and a coarse grid")
    add_output(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tables = []
    if "cosine" in arguments.parts:
        tables.append(cosines(arguments.steps))
    if "loss" in arguments.parts:
        seeds = 2 if arguments.quick else arguments.seeds
        tables += [losses(task, 100, seeds, arguments.quick) for task in tasks()]
    report(tables, arguments)


if __name__ == "__main__":
    main()
