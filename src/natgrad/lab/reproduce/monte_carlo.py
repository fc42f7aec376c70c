"""How the error of the Monte-Carlo Fisher falls with the number of draws (Yokota's slides)."""

from collections.abc import Sequence
from math import log
from typing import Any

import torch
import torch.nn.functional as F

from natgrad.curvature import EmpiricalFisher, ExactFisher, Fisher, MonteCarloFisher
from natgrad.lab.models import mlp
from natgrad.lab.reproduce.approximation import digit_pixels, mnist_pixels, train_until
from natgrad.lab.reproduce.item import Finding, Item, Result, Tell, middle
from natgrad.operators import Problem, fisher
from natgrad.tables import Column, Table

TARGETS = (0.7, 0.999)  # of training accuracy
DRAWS = tuple(4**k for k in range(4))  # of each sample's target
REPEATS = 8  # other draws, of whose errors the root of the mean square is taken
ROOM = 0.05  # of a slope
EMPIRICAL = "empirical"


class MonteCarlo(Item):
    """``F_mc`` against ``F``, in the Frobenius norm and in float64, all matrices written out, of
    the network and the images of ``approximation``."""

    name = "monte-carlo"
    title = "The error of the Monte-Carlo Fisher against the number of draws"
    papers = "Yokota's slides, the definitions of F, F_mc and C"
    printed = "the definitions: F sums over classes, F_mc over draws of them, C is at the labels."
    remark = (
        "Here: 300 images of 7 × 7 pixels and layers of 12 units, at the two training accuracies "
        "of the slides; targets are drawn for each image. The slope is that of a line through the "
        "logarithms, by least squares."
    )

    def measure(self, seed: int, smoke: bool, tell: Tell) -> Result:
        inputs, targets = digit_pixels() if smoke else mnist_pixels(seed)
        torch.manual_seed(seed)
        units, draws, repeats = (3, DRAWS[:3], 3) if smoke else (12, DRAWS, REPEATS)
        model = mlp((inputs.shape[1], units, units, units, 10)).double()
        found: dict[str, dict[str, float]] = {}
        for target in TARGETS[:1] if smoke else TARGETS:
            reached, steps = train_until(model, inputs, targets, 0.12 if smoke else target)
            tell(f"Fisher matrices at {reached:.1%} training accuracy, after {steps} steps")
            problem = Problem(model, F.cross_entropy, (inputs, targets))
            found[f"{target:.1%}"] = errors(problem, draws, repeats, 1000 * seed)
        return {"errors": found}

    def findings(self) -> tuple[Finding, ...]:
        def steady(result: Result) -> float:
            apart = [abs(slope(of) + 0.5) for of in result["errors"].values()]
            return ROOM - max(apart)

        def nearer(many: bool) -> Any:
            def margin(result: Result) -> float:
                shares: list[float] = []
                for of in result["errors"].values():
                    drawn = _drawn(of)
                    shares.append(1 - drawn[-1 if many else 0][1] / of[EMPIRICAL])
                return min(shares)

            return margin

        return (
            Finding(
                f"the error falls with the number of draws to the power -1/2 (within {ROOM})",
                steady,
                "room of",
            ),
            Finding(
                "F_mc with the most draws is nearer to F than the empirical C is",
                nearer(True),
                "error less by a share of at least",
            ),
            Finding(
                "and so is F_mc with one draw",
                nearer(False),
                "error less by a share of at least",
            ),
        )

    def table(self, results: Sequence[Result]) -> Table:
        labels = list(results[0]["errors"])
        rows = []
        for name in results[0]["errors"][labels[0]]:
            cells = (middle([r["errors"][label][name] for r in results], ".3f") for label in labels)
            rows.append((name if name == EMPIRICAL else f"{name} draws", *cells))
        slopes = (middle([slope(r["errors"][at]) for r in results], ".3f") for at in labels)
        rows.append(("slope", *slopes))
        columns = (Column("matrix"), *(Column(f"error at {at}", "right") for at in labels))
        footer = (
            "‖F_mc - F‖ / ‖F‖, the root of the mean square over draws, and ‖C - F‖ / ‖F‖; median "
            "over seeds, with the least and the most"
        )
        return Table(self.title, columns, tuple(rows), footer)

    def draw(self, axes: Any, results: Sequence[Result]) -> None:
        for index, (label, of) in enumerate(results[0]["errors"].items()):
            drawn, colour = _drawn(of), f"C{index}"
            counts = [count for count, _ in drawn]
            axes.plot(counts, [e for _, e in drawn], "o-", color=colour, label=f"F_mc, {label}")
            axes.axhline(of[EMPIRICAL], color=colour, linestyle=":", label=f"C, {label}")
            expected = [drawn[0][1] * count**-0.5 for count in counts]
            axes.plot(counts, expected, "--", color="0.6", linewidth=1)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("draws of each target")
        axes.set_ylabel("relative error to F")
        axes.legend(frameon=False)


def errors(
    problem: Problem, draws: Sequence[int], repeats: int, first_seed: int
) -> dict[str, float]:
    """``‖F_mc - F‖ / ‖F‖`` by the number of draws, the root of the mean square over other draws,
    and that of the empirical Fisher.

    Arguments:
        problem: model, loss and data.
        draws: numbers of draws of each sample's target.
        repeats: how many times each.
        first_seed: of the draws; all have others.
    """
    exact = fisher(problem, curvature=ExactFisher()).dense()

    def error(curvature: Fisher) -> float:
        return float((fisher(problem, curvature=curvature).dense() - exact).norm() / exact.norm())

    found: dict[str, float] = {}
    for index, count in enumerate(draws):
        seeds = range(first_seed + repeats * index, first_seed + repeats * (index + 1))
        squares = [error(MonteCarloFisher(samples=count, seed=seed)) ** 2 for seed in seeds]
        found[str(count)] = (sum(squares) / repeats) ** 0.5
    return {**found, EMPIRICAL: error(EmpiricalFisher())}


def slope(of: dict[str, float]) -> float:
    """Of the logarithms of the errors over those of the draws, by least squares.

    Arguments:
        of: errors by the number of draws.
    """
    points = [(log(count), log(error)) for count, error in _drawn(of)]
    x, y = (sum(values) / len(points) for values in zip(*points, strict=True))
    over = sum((a - x) ** 2 for a, _ in points)
    return float(sum((a - x) * (b - y) for a, b in points) / over)


def _drawn(of: dict[str, float]) -> list[tuple[int, float]]:
    return [(int(count), error) for count, error in of.items() if count != EMPIRICAL]
