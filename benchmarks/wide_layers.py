"""What wide layers cost, in seconds, bytes and loss: `python -m benchmarks.wide_layers`.

    MNIST    the network of pytorch/examples (two convolutions, Linear(9216, 128), Linear(128, 10)),
             batch 64: kfac.step() over the training step, on average over the first hundred steps,
             and what K-FAC keeps; the losses of both stand beside it
    head     a GPT of width 2048 with 32,000 words: what its head takes, by the plan's own counts;
             and a GPT of width 256 with 8,000 words, measured

``--whole`` adds runs without a limit (max_dim=None): of MNIST's network that is half an hour.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from time import perf_counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import natgrad
from benchmarks.page import add_output, report
from benchmarks.timing import Row, Table
from natgrad.lab.data.mnist import mnist
from natgrad.lab.models.gpt import GPT
from natgrad.linalg.workspace import release
from natgrad.placement.cost import Flops

MIB = 1 << 20
Make = Callable[[nn.Module], tuple[torch.optim.Optimizer, natgrad.KFAC | None]]


@dataclass
class Outcome:
    """Seconds of all forward and backward passes and optimizer steps, and of K-FAC; bytes that it
    keeps; mean loss of the last fifth, and of data that were not trained on."""

    training: float
    kfac: float
    kept: int
    last: float
    test: float


def example_network() -> nn.Module:
    """Of pytorch/examples, mnist/main.py, without its dropout, so that losses compare."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def run(
    model: nn.Module, make: Make, batches: Callable[[int], tuple[Tensor, Tensor]], steps: int
) -> Outcome:
    """Train for some steps; batch -1 is the one that is judged by."""
    optimizer, kfac = make(model)
    training = spent = 0.0
    losses = []
    for step in range(steps):
        x, y = batches(step)
        start = perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
        loss.backward()
        middle = perf_counter()
        if kfac is not None:
            kfac.step()
        end = perf_counter()
        optimizer.step()
        training += middle - start + perf_counter() - end
        spent += end - middle if kfac is not None else 0.0
        losses.append(loss.item())
    inner = kfac or getattr(optimizer, "kfac", None)
    kept = sum(inner.memory().total.values()) if inner is not None else 0
    x, y = batches(-1)
    with torch.no_grad():
        test = F.cross_entropy(model(x).flatten(0, -2), y.flatten()).item()
    last = losses[-max(1, steps // 5) :]
    return Outcome(training, spent, kept, sum(last) / len(last), test)


def with_kfac(rate: float, **settings: object) -> Make:
    """Damping and clip that suit a network which starts without any."""

    def make(model: nn.Module) -> tuple[torch.optim.Optimizer, natgrad.KFAC]:
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        chosen = {"damping": natgrad.Relative(0.1), "kl_clip": 0.01, **settings}
        return optimizer, natgrad.KFAC(model, optimizer, **chosen)  # type: ignore[arg-type]

    return make


def adadelta(model: nn.Module) -> tuple[torch.optim.Optimizer, None]:
    """The optimizer of the example, at its own rate."""
    return torch.optim.Adadelta(model.parameters(), lr=1.0), None


def adamw(model: nn.Module) -> tuple[torch.optim.Optimizer, None]:
    return torch.optim.AdamW(model.parameters(), lr=1e-3), None


def natural_muon(model: nn.Module) -> tuple[torch.optim.Optimizer, None]:
    return natgrad.NaturalMuon(model, lr=0.003), None


def mnist_batches(batch: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    split = mnist()

    def images(of: Tensor) -> Tensor:
        return (of.float() / 255 - 0.1307) / 0.3081

    def batches(step: int) -> tuple[Tensor, Tensor]:
        if step < 0:
            return images(split.test.images[:2000]), split.test.labels[:2000]
        generator = torch.Generator().manual_seed(step)
        index = torch.randint(len(split.train.labels), (batch,), generator=generator)
        return images(split.train.images[index]), split.train.labels[index]

    return batches


def mnist_table(steps: int, whole: bool) -> Table:
    contenders: dict[str, Make] = {
        "Adadelta, as in the example": adadelta,
        "KFAC": with_kfac(0.3),
        "KFAC, Cholesky": with_kfac(0.3, inverse=natgrad.Cholesky()),
        "NaturalMuon": natural_muon,
    }
    if whole:
        contenders["KFAC, Cholesky, max_dim=None"] = with_kfac(
            0.3, inverse=natgrad.Cholesky(), max_dim=None
        )
        contenders["KFAC, LowRank(256), max_dim=None"] = with_kfac(
            0.3, inverse=natgrad.inverses.LowRank(256), max_dim=None
        )
        contenders["KFAC, max_dim=None"] = with_kfac(0.3, max_dim=None)
    table = Table(f"pytorch/examples' MNIST network, batch 64, first {steps} steps")
    batches = mnist_batches(64)
    for name, make in contenders.items():
        torch.manual_seed(0)
        forget_workspaces()
        found = run(example_network(), make, batches, steps)
        at_defaults = name == "KFAC"
        if found.kfac:
            ratio = found.kfac / found.training
            table.rows.append(
                Row(f"{name}: kfac.step() / step", ratio, "x", 2.0 if at_defaults else None)
            )
        else:
            table.rows.append(Row(f"{name}: a step", 1e3 * found.training / steps, "ms"))
        if found.kept:
            goal = 100.0 if at_defaults else None
            table.rows.append(Row(f"{name}: kept", found.kept / MIB, "MiB", goal))
        table.rows.append(Row(f"{name}: loss of the last {max(1, steps // 5)} steps", found.last))
        table.rows.append(Row(f"{name}: test loss", found.test))
    return table


def forget_workspaces() -> None:
    """Workspaces of the run before are not of this one."""
    release()


def head_table(width: int, words: int, layers: int, tokens: int) -> Table:
    """By counts alone: 6 operations for a weight and token, those of the plan for K-FAC."""
    head = nn.Linear(width, words, bias=False, device="meta")
    table = Table(
        f"The head of a GPT of width {width:,} with {words:,} words, {layers} layers, "
        f"{tokens:,} tokens a step, by the plan"
    )
    training = 6.0 * tokens * (12 * layers * width**2 + words * width)
    for label, limit in (("KFAC", natgrad.structures.MAX_DIM), ("KFAC, max_dim=None", None)):
        plan = natgrad.KFAC(head, kl_clip=None, max_dim=limit).plan
        (block,) = plan.blocks
        costs = Flops()
        refresh = sum(costs.decompose(block.factor(name)) for name in block.decomposed)
        # Products of all tokens with themselves, of as many columns as a factor keeps together.
        update = sum(
            2.0 * tokens * spec.batch * spec.dim * (1 if spec.diagonal else spec.dim)
            for _, spec in block.factors
        )
        kfac = costs.precondition(block) + update / 10 + refresh / 100
        mine = label == "KFAC"
        ratio = (training + kfac) / training
        table.rows.append(Row(f"{label}: step with / without", ratio, "x", 1.3 if mine else None))
        total = plan.memory(0).total / MIB
        table.rows.append(Row(f"{label}: memory", total, "MiB", 300.0 if mine else None))
    return table


def text_batches(words: int, sequences: int, length: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Sequences of a Markov chain in which each word has four successors."""
    generator = torch.Generator().manual_seed(0)
    successors = torch.randint(words, (words, 4), generator=generator)

    def batches(step: int) -> tuple[Tensor, Tensor]:
        own = torch.Generator().manual_seed(10_000 + step)
        # Some words are frequent, as in a text.
        first = (torch.rand(sequences, generator=own).pow(4) * words).long()
        rows = [first]
        for _ in range(length):
            pick = torch.randint(4, (sequences,), generator=own)
            rows.append(successors[rows[-1], pick] % (1 + words // (1 + int(pick[0]) * 4)))
        tokens = torch.stack(rows, 1)
        return tokens[:, :-1], tokens[:, 1:]

    return batches


def small_gpt_table(steps: int, whole: bool) -> Table:
    words, length, sequences, width = 8000, 128, 8, 256
    table = Table(
        f"A GPT of width {width}, 2 layers, {words:,} words, {sequences * length:,} tokens a step"
    )
    contenders: dict[str, Make] = {
        "AdamW": adamw,
        "KFAC of the head": with_kfac(
            0.3, include="head", loss=natgrad.MeanLoss(length), kl_clip=1e-4
        ),
        "KFAC": with_kfac(0.3, loss=natgrad.MeanLoss(length), kl_clip=1e-4),
    }
    if whole:
        contenders["KFAC of the head, Cholesky, max_dim=None"] = with_kfac(
            0.3,
            include="head",
            loss=natgrad.MeanLoss(length),
            max_dim=None,
            kl_clip=1e-4,
            inverse=natgrad.Cholesky(),
        )
    batches = text_batches(words, sequences, length)
    for name, make in contenders.items():
        torch.manual_seed(0)
        forget_workspaces()
        model = GPT(words, length, layers=2, heads=4, width=width, tied=False)
        found = run(model, make, batches, steps)
        if found.kfac:
            ratio = (found.training + found.kfac) / found.training
            table.rows.append(Row(f"{name}: step with / without", ratio, "x"))
            table.rows.append(Row(f"{name}: kept", found.kept / MIB, "MiB"))
        table.rows.append(Row(f"{name}: loss of the last {max(1, steps // 5)} steps", found.last))
        table.rows.append(Row(f"{name}: loss of other data", found.test))
    numbers = prod((words, width))
    table.rows.append(Row("gradient of the head", 4 * numbers / MIB, "MiB"))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--whole", action="store_true", help="also without a limit")
    parser.add_argument("--only", choices=("mnist", "head", "gpt"), help="one table")
    add_output(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tables = []
    if arguments.only in (None, "head"):
        tables.append(head_table(2048, 32_000, layers=24, tokens=8 * 1024))
    if arguments.only in (None, "mnist"):
        tables.append(mnist_table(arguments.steps, arguments.whole))
    if arguments.only in (None, "gpt"):
        tables.append(small_gpt_table(arguments.steps, arguments.whole))
    report(tables, arguments)


if __name__ == "__main__":
    main()
