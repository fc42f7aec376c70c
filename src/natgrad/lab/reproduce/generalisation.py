"""Measures of generalisation against the gap between test and training, over a set of nets
(Yokota's slides, after Jiang et al. 2020)."""

from collections.abc import Callable, Sequence
from itertools import product
from math import inf
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from natgrad.lab import data
from natgrad.lab.models import mlp
from natgrad.lab.reproduce.item import Finding, Item, Result, Tell, middle
from natgrad.lab.reproduce.rank_correlation import chance, granulated, kendall
from natgrad.measures import (
    fisher_rao,
    gradient_variance,
    pac_bayes,
    path_norm,
    sharpness,
    spectral_bound,
    tic,
)
from natgrad.operators import Problem, ggn
from natgrad.structures import Kronecker
from natgrad.tables import Column, Table

# What nets differ in. All are trained to the same loss, so that none is only less far; those that
# do not get there are left out.
AXES: dict[str, tuple[float, ...]] = {
    "width": (12, 48),
    "batch": (16, 128),
    "rate": (0.01, 0.04),
    "label noise": (0.0, 0.2),
}
SMALL: dict[str, tuple[float, ...]] = {
    **AXES,
    "batch": (16,),
    "rate": (0.04,),
}
SAMPLES, LOSS, EPOCHS = 400, 0.05, 500

MEASURES: dict[str, Callable[[Problem, int], float]] = {
    "spectral bound": lambda problem, seed: spectral_bound(problem).complexity,
    "path norm": lambda problem, seed: path_norm(problem),
    "Fisher-Rao norm": lambda problem, seed: float(fisher_rao(problem)),
    "variance of gradients": lambda problem, seed: gradient_variance(problem).total,
    "sharpness": lambda problem, seed: _largest(problem),
    "PAC-Bayes": lambda problem, seed: pac_bayes(problem, seed=seed).kl,
    "TIC": lambda problem, seed: float(
        tic(problem, matrix=lambda p: ggn(p, structure=Kronecker()), damping=1e-3).penalty
    ),
}


class Generalisation(Item):
    """MLPs on a part of the digits, some of whose labels are drawn anew."""

    name = "generalisation"
    title = "Measures of generalisation against the generalisation gap"
    papers = "Yokota's slides: generalisation metrics, and myths of large batches"
    printed = (
        "a list: spectral bound, path norm, Fisher-Rao metric, variance of gradients, sharpness, "
        "PAC-Bayesian, Takeuchi's criterion; and that flat minima do not always generalise."
    )
    remark = (
        "Here: 16 MLPs of one hidden layer for each seed, of all combinations of width (12, 48), "
        "batch (16, 128), learning rate (0.01, 0.04) and share of labels drawn anew (0, 0.2), "
        "trained by SGD with momentum on 400 digits to a loss of 0.05; those that do not reach it "
        "in 500 epochs are left out. (With a rate of 0.12, tried before, some did not.) "
        "The gap is the accuracy on the training samples, with the labels they were trained with, "
        "less that on 360 test samples. The measures are read from the training samples alone: the "
        "spectral complexity, the KL divergence of the PAC-Bayes bound, the penalty of Takeuchi's "
        "criterion with Kronecker factors of G. Label noise makes the largest gaps, and with them "
        "most of each τ; the last column, which compares nets that differ in one thing alone and "
        "averages over what that is, weighs it as one of four. Wider nets "
        "have smaller gaps here, and larger penalties of Takeuchi's criterion, whose trace grows "
        "with the parameters: hence its sign. Jiang et al. 2020 compare thousands of convolutional "
        "networks without label noise."
    )

    def measure(self, seed: int, smoke: bool, tell: Tell) -> Result:
        axes = SMALL if smoke else AXES
        x, y, tests = _digits(seed, 60 if smoke else SAMPLES)
        nets = []
        for index, values in enumerate(product(*axes.values())):
            net = dict(zip(axes, values, strict=True))
            if index % 8 == 0:
                tell(f"net {index + 1} of {np.prod([len(one) for one in axes.values()])}")
            found = _net(net, x, y, tests, seed, (3, inf) if smoke else (EPOCHS, LOSS))
            nets += [] if found is None else [found]
        return {"nets": nets, "tried": index + 1}

    def findings(self) -> tuple[Finding, ...]:
        def beyond_chance(name: str) -> Finding:
            def margin(result: Result) -> float:
                values, gaps = _of(result, name), _of(result, "gap")
                return kendall(values, gaps) - _quantile(values, gaps)

            return Finding(
                f"{name} ranks nets as their gaps do (Kendall's τ beyond 95% of permutations)",
                margin,
                "τ above that by",
            )

        def sometimes(result: Result) -> float:
            agreed = _alone(result, "sharpness")
            return sum((1 - value) / 2 for value in agreed.values()) / len(agreed) - 0.2

        return (
            *(beyond_chance(name) for name in MEASURES),
            Finding(
                "flat minima do not always generalise: of two nets that differ in one thing, the "
                "flatter one has the larger gap in at least one pair of five",
                sometimes,
                "more than that by a share of pairs of",
            ),
        )

    def table(self, results: Sequence[Result]) -> Table:
        rows = []
        for name in ("parameters", *MEASURES):
            pairs = [(_of(r, name), _of(r, "gap")) for r in results]
            taus = [kendall(*pair) for pair in pairs]
            spread = [float(np.std(chance(*pair, seed=0))) for pair in pairs]
            agreed = [_alone(r, name) for r in results]
            means = [sum(one.values()) / len(one) for one in agreed]
            cells = (middle(values, ".2f") for values in (taus, spread, means))
            rows.append((name, *cells))
        tried = results[0]["tried"]
        count = ", ".join(f"{len(r['nets'])} of {tried}" for r in results)
        names = ("Kendall's τ with the gap", "deviation by chance", "τ, one thing at a time")
        columns = (Column("measure"), *(Column(name, "right") for name in names))
        footer = (
            f"{count} nets reached the loss; deviation by chance: of τ over 1,000 permutations of "
            "the gaps; median over seeds, with the least and the most"
        )
        return Table(self.title, columns, tuple(rows), footer)

    def draw(self, axes: Any, results: Sequence[Result]) -> None:
        names = list(MEASURES)
        for seed, result in enumerate(results):
            gaps = _of(result, "gap")
            taus = [kendall(_of(result, name), gaps) for name in names]
            label = "Kendall's τ, of a seed" if seed == 0 else None
            axes.plot(taus, range(len(names)), "o", color="C0", label=label)
        bound = _quantile(_of(results[0], names[0]), _of(results[0], "gap"))
        axes.axvspan(-bound, bound, color="0.9", label="90% of permutations")
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlim(-1, 1)
        axes.set_xlabel("rank correlation with the gap")
        axes.legend(frameon=False)


def _net(
    net: dict[str, float],
    x: Tensor,
    y: Tensor,
    tests: tuple[Tensor, Tensor],
    seed: int,
    length: tuple[int, float],
) -> dict[str, Any] | None:
    """Train one for so many epochs, or to this loss, and measure it if it got there."""
    generator = torch.Generator().manual_seed(seed)
    noisy = torch.rand(len(y), generator=generator) < net["label noise"]
    labels = torch.where(noisy, torch.randint(10, y.shape, generator=generator), y)
    torch.manual_seed(seed)
    model = mlp((x.shape[1], int(net["width"]), 10))
    if not _fits(model, x, labels, int(net["batch"]), net["rate"], *length):
        return None
    with torch.no_grad():
        output = model(x)
        fitted = float((output.argmax(1) == labels).double().mean())
        loss = float(F.cross_entropy(output, labels))
        tested = float((model(tests[0]).argmax(1) == tests[1]).double().mean())
    problem = Problem(model, F.cross_entropy, (x, labels))
    found = {name: float(measure(problem, seed)) for name, measure in MEASURES.items()}
    found["parameters"] = float(sum(p.numel() for p in model.parameters()))
    return {"settings": net, "gap": fitted - tested, "loss": loss, "measures": found}


def _fits(
    model: nn.Module, x: Tensor, y: Tensor, batch: int, rate: float, epochs: int, target: float
) -> bool:
    """Train; whether the mean loss of all samples came below the target."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    for _ in range(epochs):
        for rows in torch.randperm(len(y)).split(batch):
            optimizer.zero_grad(set_to_none=True)
            F.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
        with torch.no_grad():
            if float(F.cross_entropy(model(x), y)) < target:
                return True
    return False


def _digits(seed: int, count: int) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    split = data.digits()
    rows = torch.randperm(len(split.train), generator=torch.Generator().manual_seed(seed))[:count]
    images, labels = split.train.tensors()
    tests, expected = split.test.tensors()
    return images[rows].flatten(1), labels[rows], (tests.flatten(1), expected)


def _largest(problem: Problem) -> float:
    return sharpness(problem).largest


def _of(result: Result, name: str) -> list[float]:
    if name == "gap":
        return [float(net["gap"]) for net in result["nets"]]
    return [float(net["measures"][name]) for net in result["nets"]]


def _alone(result: Result, name: str) -> dict[str, float]:
    """By what nets differ in alone, ``τ`` of these pairs."""
    settings = [net["settings"] for net in result["nets"]]
    return granulated(settings, _of(result, name), _of(result, "gap"))


def _quantile(values: Sequence[float], gaps: Sequence[float]) -> float:
    """Of τ, which 95% of permutations of the gaps stay below."""
    return float(np.quantile(chance(values, gaps, seed=0), 0.95))
