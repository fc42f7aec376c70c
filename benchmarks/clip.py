"""What the default KL clip was chosen from: `python -m benchmarks.clip`.

K-FAC at its defaults before SGD, with and without momentum, at clips on the whole way that a
gradient moves the weights, `lr / (1 - m)`; 0.1 with momentum 0.9 is the papers' 1e-3 on `lr` alone.
Six tasks, 100 steps (200 of the VAE, 120 of the GPT) at one learning rate, which does not matter
where the clip acts. Mean loss of the last 20 steps, and the greatest of any step: above the first
one's, training has exploded on its way.

MNIST is read as `natgrad data` finds it; `--tasks` chooses others.
"""

import argparse
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import natgrad
from benchmarks import loops, quality, wide_quality
from benchmarks.networks import digits_autoencoder, small_cnn

SETTINGS: dict[str, tuple[float, float | None]] = {
    "SGD, 0.9": (0.9, None),
    "K-FAC, 0.9, 0.1": (0.9, 0.1),
    "K-FAC, 0.9, 0.01": (0.9, 0.01),
    "K-FAC, 0.9, 0.003": (0.9, 0.003),
    "K-FAC, 0.9, 0.001": (0.9, 0.001),
    "K-FAC, 0, 0.01": (0.0, 0.01),
    "K-FAC, 0, 0.001": (0.0, 0.001),
}
Batches = Iterator[Any]


@dataclass(frozen=True)
class Task:
    """A network, its batches by a seed, the loss of one, a learning rate and a number of steps."""

    network: Callable[[], nn.Module]
    batches: Callable[[int], Batches]
    loss: Callable[[nn.Module, Any], Tensor]
    rate: float
    steps: int


def class_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def pixel_loss(model: nn.Module, batch: Any) -> Tensor:
    return quality.pixel_loss(model(batch[0]), batch[1])


def mnist_batches(seed: int) -> Batches:
    batches = wide_quality.images()
    step = 0
    while True:
        yield batches(step, seed)
        step += 1


def digit_batches(*, images: bool) -> Callable[[int], Batches]:
    def batches(seed: int) -> Batches:
        pixels, classes = quality.digits()
        generator = torch.Generator().manual_seed(seed)
        while True:
            some = torch.randint(len(pixels), (128,), generator=generator)
            x = pixels[some]
            yield (x.view(-1, 1, 8, 8), classes[some]) if images else (x, x)

    return batches


def of_loop(name: str, steps: int) -> Task:
    loop = loops.LOOPS[name]

    def batches(seed: int) -> Batches:
        return loop.batches(torch.Generator().manual_seed(seed))

    return Task(loop.model, batches, loop.loss, loop.rate, steps)


TASKS: dict[str, Task] = {
    "MNIST, convnet": Task(wide_quality.convnet, mnist_batches, class_loss, 0.1, 100),
    "MNIST, MLP": Task(wide_quality.mlp, mnist_batches, class_loss, 0.1, 100),
    "digits, autoencoder": Task(
        digits_autoencoder, digit_batches(images=False), pixel_loss, 0.1, 100
    ),
    "digits, convnet": Task(small_cnn, digit_batches(images=True), class_loss, 0.1, 100),
    "VAE": of_loop("VAE, SGD", 200),
    "GPT": of_loop("GPT, SGD", 120),
}


def train(task: Task, momentum: float, clip: float | None, seed: int) -> tuple[float, float]:
    """Mean of the last 20 losses, and the greatest of all; without K-FAC if there is no clip."""
    torch.manual_seed(seed)
    model = task.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=task.rate, momentum=momentum)
    kfac = None if clip is None else natgrad.KFAC(model, optimizer, kl_clip=clip)
    batches, seen = task.batches(seed), []
    for _ in range(task.steps):
        optimizer.zero_grad()
        loss = task.loss(model, next(batches))
        loss.backward()
        if kfac is not None:
            kfac.step()
        optimizer.step()
        seen.append(loss.item())
    worst = max(x if math.isfinite(x) else math.inf for x in seen)
    return (statistics.fmean(seen[-20:]) if math.isfinite(worst) else math.inf), worst


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print("| task | " + " | ".join(SETTINGS) + " |\n|---|" + "---:|" * len(SETTINGS))
    for name in arguments.tasks:
        cells = []
        for momentum, clip in SETTINGS.values():
            found = [train(TASKS[name], momentum, clip, s) for s in range(arguments.seeds)]
            last, worst = (statistics.fmean(each) for each in zip(*found, strict=True))
            cells.append(f"{last:.4g} ({worst:.3g})")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
