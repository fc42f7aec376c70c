"""How a factor that is too wide should be kept: `python -m benchmarks.wide_quality`.

Factors that are narrow enough to be kept whole are kept in part, and the losses are compared:

    inputs     MNIST, 784-256-64-10, A of the first layer (785 columns)
    channels   MNIST, two convolutions and Linear(576, 128), A of the latter (577 columns)
    words      pairs of letters of a text, the next one of 800 from the last four, G of the head

as a whole, in diagonal blocks, as a diagonal, or not at all (the identity). Mean over seeds of the
loss of the last 30 steps, and of data that were not trained on.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import natgrad
from benchmarks.page import add_output, report
from benchmarks.timing import Row, Table
from natgrad import Kronecker
from natgrad.inverses import Decomposed
from natgrad.lab.data.mnist import mnist
from natgrad.lab.data.text import tinyshakespeare
from natgrad.schedules import Doubling
from natgrad.structures import Factor, Factors
from natgrad.structures.base import AnyLayer

STEPS = 150


@dataclass(frozen=True)
class OneSided(Kronecker):
    """Only one of the factors, ``"A"`` or ``"G"``; the other side is the identity."""

    side: str = "G"

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.side,)

    def factors(self, layers: Sequence[AnyLayer]) -> dict[str, Factor]:
        return {self.side: super().factors(layers)[self.side]}

    def dampings(self, kept: dict[str, Tensor], forms: Any, damping: float) -> dict[str, Tensor]:
        return {self.side: kept[self.side].new_full((forms[self.side].batch,), damping)}

    def assemble(self, decomposed: Factors, in_basis: Mapping[str, Tensor]) -> Decomposed:
        own = decomposed[self.side]
        return own.inverse.kronecker(decomposed.get("G"), decomposed.get("A"))


@dataclass(frozen=True)
class Task:
    """A network, the layer in question, the side that is kept in part, and batches; batch -1 is
    the one that is judged by."""

    make: Callable[[], nn.Module]
    layer: str
    side: str
    batches: Callable[[int, int], tuple[Tensor, Tensor]]

    def ways(self) -> dict[str, Kronecker]:
        other = "G" if self.side == "A" else "A"
        name = "input_block" if self.side == "A" else "gradient_block"
        blocks = {f"blocks of {size}": Kronecker(**{name: size}) for size in (256, 128, 32)}
        return {
            "whole": Kronecker(),
            **blocks,
            "diagonal": Kronecker(**{name: 1}),
            "identity": OneSided(side=other),
        }


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(800, 32), nn.Linear(128, 128)
        self.head = nn.Linear(128, 800)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.hidden(self.embedding(x).flatten(1))))
        return out


def mlp() -> nn.Module:
    sizes = (784, 256, 64, 10)
    layers: list[nn.Module] = [nn.Flatten()]
    for i in range(3):
        layers += [nn.Linear(sizes[i], sizes[i + 1]), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(576, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def images() -> Callable[[int, int], tuple[Tensor, Tensor]]:
    split = mnist()

    def batches(step: int, seed: int) -> tuple[Tensor, Tensor]:
        of = split.train if step >= 0 else split.test
        generator = torch.Generator().manual_seed(1000 * seed + step + 1)
        index = torch.randint(len(of.labels), (64 if step >= 0 else 2000,), generator=generator)
        return (of.images[index].float() / 255 - 0.1307) / 0.3081, of.labels[index]

    return batches


def pairs() -> Callable[[int, int], tuple[Tensor, Tensor]]:
    letters = tinyshakespeare()
    found = [letters[i : i + 2] for i in range(0, min(400_000, len(letters)) - 1, 2)]
    number = {pair: i for i, (pair, _) in enumerate(Counter(found).most_common(799))}
    ids = torch.tensor([number.get(pair, 799) for pair in found])
    cut = len(ids) * 9 // 10

    def batches(step: int, seed: int) -> tuple[Tensor, Tensor]:
        first, end, count = (0, cut, 128) if step >= 0 else (cut, len(ids), 4000)
        generator = torch.Generator().manual_seed(1000 * seed + step + 1)
        at = torch.randint(first, end - 5, (count,), generator=generator)
        return torch.stack([ids[at + k] for k in range(4)], 1), ids[at + 4]

    return batches


def train(task: Task, structure: Kronecker, optimizer: str, seed: int) -> tuple[float, float]:
    torch.manual_seed(seed)
    model = task.make()

    def structure_of(layer: AnyLayer) -> Kronecker:
        return structure if layer.name == task.layer else Kronecker()

    kfac = None
    stepper: torch.optim.Optimizer
    if optimizer == "KFAC":
        stepper = torch.optim.SGD(model.parameters(), lr=0.3)
        kfac = natgrad.KFAC(
            model,
            stepper,
            structure=structure_of,
            damping=natgrad.Relative(0.1),
            kl_clip=0.01,
            refresh_every=Doubling(20),
        )
    else:
        stepper = natgrad.NaturalMuon(model, lr=0.003, structure=structure_of)
    losses = []
    for step in range(STEPS):
        x, y = task.batches(step, seed)
        stepper.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        if kfac is not None:
            kfac.step()
        stepper.step()
        losses.append(loss.item())
    x, y = task.batches(-1, seed)
    with torch.no_grad():
        return fmean(losses[-30:]), F.cross_entropy(model(x), y).item()


def quality_table(name: str, task: Task, optimizer: str, seeds: int) -> Table:
    table = Table(f"{name}, {optimizer}: {task.side} of layer {task.layer!r}, {seeds} seeds")
    for label, structure in task.ways().items():
        found = [train(task, structure, optimizer, seed) for seed in range(seeds)]
        last, test = (fmean(each) for each in zip(*found, strict=True))
        table.rows.append(Row(f"{label}: loss of the last 30 steps", last))
        table.rows.append(Row(f"{label}: loss of other data", test))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=("inputs", "channels", "words"), help="one task")
    add_output(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tasks = {
        "inputs": lambda: Task(mlp, "1", "A", images()),
        "channels": lambda: Task(convnet, "6", "A", images()),
        "words": lambda: Task(Words, "head", "G", pairs()),
    }
    chosen = [arguments.only] if arguments.only else list(tasks)
    tables = [
        quality_table(name, tasks[name](), optimizer, arguments.seeds)
        for name in chosen
        for optimizer in ("KFAC", "NaturalMuon")
    ]
    report(tables, arguments)


if __name__ == "__main__":
    main()
