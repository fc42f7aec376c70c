"""How good approximations of H, F, F_mc and C are, early and late in training (Yokota's slides)."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from natgrad.lab import data
from natgrad.lab.models import mlp
from natgrad.lab.report.quality import MATRICES, quality
from natgrad.lab.reproduce.item import Finding, Item, Result, Tell, middle
from natgrad.operators import Problem
from natgrad.tables import Column, Table

SHOWN = ("full", "layer block", "Kronecker", "diagonal")
TARGETS = (0.7, 0.999)  # of training accuracy
SAMPLES, LIMIT = 300, 4000


class Approximation(Item):
    """Of a network of four layers on MNIST's images, averaged over 4 x 4 pixels so that all its
    matrices can be written out."""

    name = "approximation"
    title = "How much full, block, Kronecker and diagonal matrices keep of H, F, F_mc and C"
    papers = "Yokota's slides, after the definitions of H, G, F and C"
    printed = (
        "a figure for an MLP of four layers on MNIST at 70.0% and 99.9% training accuracy; K-FAC "
        "has the best balance of accuracy and cost."
    )
    remark = (
        "Here: 300 images of 7 × 7 pixels and layers of 12 units, by Adam on all images at once; "
        "damping 1e-3 where gradients are solved."
    )

    def measure(self, seed: int, smoke: bool, tell: Tell) -> Result:
        inputs, targets = digit_pixels() if smoke else mnist_pixels(seed)
        torch.manual_seed(seed)
        units = 3 if smoke else 12
        model = mlp((inputs.shape[1], units, units, units, 10)).double()
        found: dict[str, dict[str, dict[str, float]]] = {}
        for target in TARGETS[:1] if smoke else TARGETS:
            reached, steps = train_until(model, inputs, targets, 0.12 if smoke else target)
            label = f"{target:.1%}"
            tell(f"approximations at {reached:.1%} training accuracy, after {steps} steps")
            problem = Problem(model, F.cross_entropy, (inputs, targets))
            cells = quality(problem, label, seed=seed, structures=SHOWN, progress=False).cells
            found[label] = {
                f"{one.matrix}, {one.structure}": {
                    "own": one.own.error,
                    "fisher": one.fisher.error,
                    "cosine": one.fisher.cosine,
                }
                for one in cells
            }
        return {"errors": found}

    def findings(self) -> tuple[Finding, ...]:
        def nearer(better: str, worse: str, by: str) -> Any:
            def margin(result: Result) -> float:
                sign = -1.0 if by == "cosine" else 1.0
                return min(
                    sign * (float(of[f"{m}, {worse}"][by]) - float(of[f"{m}, {better}"][by]))
                    for of in result["errors"].values()
                    for m in MATRICES
                )

            return margin

        return (
            Finding(
                "layer-wise blocks are nearer to each matrix than Kronecker factors",
                nearer("layer block", "Kronecker", "own"),
                "relative error less by at least",
            ),
            Finding(
                "Kronecker factors are nearer to each matrix than a diagonal",
                nearer("Kronecker", "diagonal", "own"),
                "relative error less by at least",
            ),
            Finding(
                "and so is the direction of the natural gradient of the exact Fisher",
                nearer("Kronecker", "diagonal", "cosine"),
                "cosine more by at least",
            ),
        )

    def table(self, results: Sequence[Result]) -> Table:
        rows = []
        for label, of in results[0]["errors"].items():
            for name in of:
                cells = [result["errors"][label][name] for result in results]
                numbers = (
                    middle([c[by] for c in cells], ".2f") for by in ("own", "fisher", "cosine")
                )
                rows.append((label, name, *numbers))
        names = ("error to itself in full", "to the full F", "cosine to F's step")
        columns = (Column("accuracy"), Column("matrix"), *(Column(n, "right") for n in names))
        footer = "‖A - B‖ / ‖B‖; median over seeds, with the least and the most"
        return Table(self.title, columns, tuple(rows), footer)

    def draw(self, axes: Any, results: Sequence[Result]) -> None:
        for index, (label, of) in enumerate(results[0]["errors"].items()):
            for kind, mark in zip(SHOWN, "*o^x", strict=True):
                values = [of[f"{matrix}, {kind}"]["fisher"] for matrix in MATRICES]
                name = f"{kind}, {label}"
                axes.plot(MATRICES, values, f"{mark}--", color=f"C{index}", label=name)
        axes.set_ylabel("relative error to the full Fisher")
        axes.set_yscale("log")
        axes.legend(frameon=False, fontsize=7, ncols=2)


def mnist_pixels(seed: int) -> tuple[Tensor, Tensor]:
    """Some images of MNIST of 7 x 7 pixels with their labels, other ones for every seed.

    Arguments:
        seed: which.
    """
    split = data.mnist().train
    rows = torch.randperm(len(split), generator=torch.Generator().manual_seed(seed))[:SAMPLES]
    images = F.avg_pool2d(split.images[rows].double() / 255, 4)
    return images.flatten(1), split.labels[rows].long()


def digit_pixels() -> tuple[Tensor, Tensor]:
    """A few digits of 2 x 2 pixels with their labels, for a run of seconds."""
    split = data.digits().train
    return F.avg_pool2d(split.images[:40].double() / 16, 4).flatten(1), split.labels[:40].long()


def train_until(model: nn.Module, x: Tensor, y: Tensor, target: float) -> tuple[float, int]:
    """Train to an accuracy on all samples, or as near as ``LIMIT`` steps come; that, and the steps.

    Arguments:
        model: that classifies; trained in place by Adam.
        x: inputs of all samples.
        y: their labels.
        target: accuracy at which the training ends.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    reached = 0.0
    for step in range(LIMIT):
        output = model(x)
        reached = float((output.argmax(1) == y).double().mean())
        if reached >= target:
            return reached, step
        optimizer.zero_grad()
        F.cross_entropy(output, y).backward()
        optimizer.step()
    return reached, LIMIT
