"""Steps to a target by batch size, with the predicted critical batch size (Osawa 2019, table 1;
Yokota's slides, after McCandlish et al. 2018)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import exp, inf, isfinite, log
from typing import Any

import torch.nn.functional as F

from natgrad.lab.reproduce.courses import (
    Course,
    best_course,
    count_text,
    course,
    settings_of,
    share_less,
    spread_text,
    steps_to,
)
from natgrad.lab.reproduce.item import Finding, Item, Result, Tell, middle
from natgrad.lab.reproduce.small_images import FASHION
from natgrad.lab.train.settings import Settings
from natgrad.lab.train.training import Training
from natgrad.measures import Signs, noise_scale
from natgrad.operators import Problem, ggn
from natgrad.tables import Column, Table

OPTIMIZERS = {"sgd": "SGD", "kfac": "K-FAC"}
BATCHES = (16, 64, 256, 1024)
TARGET = ("test_loss", 0.7)
TRIALS, LIMIT = 3, 400
NEAR = 4.0  # factor within which a prediction is one
MEASURED = 500  # samples of the noise scale


class CriticalBatch(Item):
    """A small convnet on Fashion-MNIST, with a constant learning rate that is looked for anew at
    every batch size, by as many trials for each optimizer."""

    name = "critical-batch"
    title = "Steps to a target by batch size, and the critical batch size"
    papers = "Osawa 2019, table 1 and sec. 5.3; Yokota's slides (McCandlish et al. 2018)"
    printed = (
        "75% in 10,948, 5,434, 2,737, 1,760, 1,173, 978 iterations by batches of 4,096 to 131,072, "
        "which are 35, 35, 35, 45, 60, 100 epochs; of the critical batch size the formula alone."
    )
    cluster = (
        "natgrad train --preset imagenet-resnet50-bs4096 --target 0.75 (and with the other five "
        "batches)"
    )
    remark = (
        "Here: images of 14 × 14 pixels and a convnet of 4 and 8 channels, to a test loss of 0.7 "
        "within 400 steps, tested at intervals of 10% of the steps; momentum 0.9; of K-FAC new "
        "factors at every step and decompositions at every tenth. Three learning rates, a factor "
        "of 4 apart, for each optimizer at each batch size, around the best of the next larger "
        "batch (its usual one at the largest); the fewest steps count. Three are few: with a rate "
        "between those tried, or in more than 400 steps, SGD may well get there by batches of 16 "
        "in every seed, so how far K-FAC is ahead there says little. What is seen is that K-FAC "
        "needs about as many steps at every batch size, perhaps because the KL clip bounds each of "
        "them whatever the rate: larger batches win it nothing here, where the paper's do up to "
        "131,072 images. The noise scale is that of SGD's run by batches of 256 (of 500 test "
        "samples, the Gauss-Newton matrix as H), averaged over its steps. The critical size of an "
        "optimizer's own is B in S (1 + B/batch), fitted to its steps. A setting tried before, "
        "from batches of 8 upwards, was given up in its first seed, as SGD's three rates there "
        "were all too high."
    )

    def measure(self, seed: int, smoke: bool, tell: Tell) -> Result:
        batches, limit, trials = (BATCHES[:2], 12, 1) if smoke else (BATCHES, LIMIT, TRIALS)
        task = Settings(
            data="digits" if smoke else FASHION,
            network="convnet",
            width=4,
            steps=limit,
            seed=seed,
            test_samples=0 if smoke else 500,
        )
        target = (TARGET[0], 2.25) if smoke else TARGET
        found: dict[str, dict[str, Course]] = {}
        scales: list[float] = []
        for key in OPTIMIZERS:
            found[key] = {}
            centre = settings_of(key, task).lr
            for batch in reversed(batches):  # smaller ones need lower rates
                best = self._best(key, batch, centre, task, target, trials, tell)
                centre = best["lr"]
                found[key][str(batch)] = best
            found[key] = {str(batch): found[key][str(batch)] for batch in batches}
            if key == "sgd":
                middle_batch = batches[len(batches) // 2]
                lr = found[key][str(middle_batch)]["lr"]
                scales = _scales(_settings(key, middle_batch, task, lr), target, smoke)
        return {"target": target[1], "runs": found, "noise_scales": scales}

    def _best(
        self,
        key: str,
        batch: int,
        centre: float,
        task: Settings,
        target: tuple[str, float],
        trials: int,
        tell: Tell,
    ) -> Course:
        least = [float(task.steps)]  # no trial needs to be longer than the best before it

        def run(lr: float) -> Course:
            settings = _settings(key, batch, task, lr, steps=int(least[0]))
            made = course(settings, geometric(settings.steps), stop=target)
            least[0] = min(least[0], steps_to(made, *target))
            return made

        def score(made: Course) -> tuple[float, ...]:
            value = made["test_loss"][-1] if made["ended"] else inf
            return steps_to(made, *target), value

        best = best_course(run, centre, trials, score)
        reached = steps_to(best, *target)
        tell(f"{OPTIMIZERS[key]}, batch {batch}: {count_text(reached)} steps, rate {best['lr']:g}")
        kept = {name: best[name] for name in ("lr", "tried", "edge")}
        return {**kept, "steps": reached if isfinite(reached) else None}

    def findings(self) -> tuple[Finding, ...]:
        def falls(result: Result) -> float:
            steps = _steps(result["runs"]["kfac"])
            return min(share_less(more, less) for less, more in pairwise(steps.values()))

        def dearer(result: Result) -> float:
            steps = _steps(result["runs"]["kfac"])
            samples = [batch * count for batch, count in steps.items()]
            growth = [after / before for before, after in pairwise(samples)]
            return growth[-1] / growth[0] - 1 if isfinite(samples[-1]) else -inf

        def fewer(result: Result) -> float:
            ours, other = (_steps(result["runs"][key]) for key in ("kfac", "sgd"))
            return min(share_less(ours[batch], other[batch]) for batch in ours)

        def gains(result: Result) -> float:
            ours, other = (_steps(result["runs"][key]) for key in ("kfac", "sgd"))
            ratios = [other[batch] / ours[batch] for batch in ours]
            return ratios[-1] / ratios[0] - 1

        def predicted(result: Result) -> float:
            return NEAR - _apart(predicted_size(result), fitted_size(result["runs"]["sgd"]))

        return (
            Finding(
                "K-FAC needs fewer iterations at every larger batch, also at the largest",
                falls,
                "fewer by a share of at least",
            ),
            Finding(
                "its epochs hardly grow at first, and more at the largest batches",
                dearer,
                "growth of the last over that of the first enlargement, less 1:",
            ),
            Finding(
                "K-FAC converges in fewer iterations than SGD at every batch size",
                fewer,
                "fewer by a share of at least",
            ),
            Finding(
                "it can use larger batches than SGD: the larger, the further it is ahead",
                gains,
                "SGD's steps over its own, at the largest batch over the smallest, less 1:",
            ),
            Finding(
                f"the noise scale predicts SGD's critical batch size within a factor of {NEAR:g}",
                predicted,
                "of which is left",
            ),
        )

    def table(self, results: Sequence[Result]) -> Table:
        rows = []
        for batch in results[0]["runs"]["sgd"]:
            cells = [batch]
            for key in OPTIMIZERS:
                steps = [_steps(r["runs"][key])[int(batch)] for r in results]
                rates = [r["runs"][key][batch]["lr"] for r in results]
                cells += [spread_text(steps, count_text), middle(rates, ".3g")]
            rows.append(tuple(cells))
        predicted = middle([predicted_size(r) for r in results], ",.0f")
        fitted = (
            f"{title} {middle([fitted_size(r['runs'][key]) for r in results], ',.0f')}"
            for key, title in OPTIMIZERS.items()
        )
        columns = [Column("batch")]
        for title in OPTIMIZERS.values():
            columns += [Column(f"steps of {title}", "right"), Column("learning rate", "right")]
        footer = (
            f"steps to a test loss of {results[0]['target']:g}; median over seeds, with the least "
            f"and the most. Critical batch size: predicted {predicted}; fitted to the steps of "
            f"{', of '.join(fitted)}. {_edges(results)}"
        )
        return Table(self.title, tuple(columns), tuple(rows), footer)

    def draw(self, axes: Any, results: Sequence[Result]) -> None:
        for index, (key, title) in enumerate(OPTIMIZERS.items()):
            color = f"C{index}"
            for place, result in enumerate(results):
                steps = _steps(result["runs"][key])
                label = title if place == 0 else None
                axes.plot(list(steps), list(steps.values()), "o-", color=color, label=label, lw=1)
        sizes = sorted(predicted_size(result) for result in results)
        label = "predicted critical batch size"
        axes.axvspan(sizes[0], sizes[-1], color="0.85", label=label)
        axes.axvline(sizes[len(sizes) // 2], color="0.4", linestyle="--")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("batch")
        axes.set_ylabel("steps to the target")
        axes.legend(frameon=False)


def _edges(results: Sequence[Result]) -> str:
    """How often more trials might have found a better learning rate."""
    runs = [one for r in results for of in r["runs"].values() for one in of.values()]
    count = sum(one["edge"] for one in runs)
    return (
        f"In {count} of {len(runs)} cases the best rate is the lowest or the highest of those tried"
    )


def geometric(limit: int, share: float = 0.1) -> set[int]:
    """1, 2, 3, … and later at intervals of a ``share`` of the steps.

    Arguments:
        limit: the last one.
        share: of the steps so far.
    """
    found, step = set(), 1
    while step <= limit:
        found.add(step)
        step += max(1, int(share * step))
    return found | {limit}


def predicted_size(result: Result) -> float:
    """The noise scale, averaged over the steps of the run."""
    scales = result["noise_scales"]
    return float(sum(scales) / len(scales))


def fitted_size(runs: Mapping[str, Mapping[str, Any]]) -> float:
    """``B`` of ``S (1 + B / batch)``, by least squares of the logarithms; of those that reached the
    target, and infinite if fewer than two did.

    Arguments:
        runs: by batch, each with its ``steps``.
    """
    steps = {batch: count for batch, count in _steps(runs).items() if isfinite(count)}
    if len(steps) < 2:
        return inf

    def error(size: float) -> float:
        shifts = [log(count / (1 + size / batch)) for batch, count in steps.items()]
        centre = sum(shifts) / len(shifts)
        return sum((one - centre) ** 2 for one in shifts)

    tried = [exp(k / 50) for k in range(round(50 * log(1e6)) + 1)]
    return min(tried, key=error)


def _steps(runs: Mapping[str, Mapping[str, Any]]) -> dict[int, float]:
    return {
        int(batch): inf if one["steps"] is None else float(one["steps"])
        for batch, one in runs.items()
    }


def _apart(one: float, other: float) -> float:
    """By which factor, at least 1."""
    if not (isfinite(one) and isfinite(other) and min(one, other) > 0):
        return inf
    return max(one / other, other / one)


def _settings(key: str, batch: int, task: Settings, lr: float, **others: Any) -> Settings:
    own = {"update_every": "every(steps=1)", "refresh_every": "every(steps=10)"}
    return replace(settings_of(key, task, **own), lr=lr, batch_size=batch, **others)


def _scales(settings: Settings, target: tuple[str, float], smoke: bool) -> list[float]:
    """The noise scale at tests that lie evenly in the steps to the target."""
    whole = course(settings, geometric(settings.steps), stop=target)["steps"][-1]
    tests = {max(1, round(whole * part / 5)) for part in range(1, 6)}
    found: list[float] = []

    def look(step: int, run: Training) -> None:
        if step > whole:
            return
        count = 40 if smoke else MEASURED
        rows = list(range(min(count, len(run.task.test))))
        batch = run.task.test.take(rows, run.stream.drawn(run.task.test, rows))
        problem = Problem(run.network.eval(), F.cross_entropy, run.task.prepared(batch, run.device))
        scale = noise_scale(problem, matrix=ggn, by=Signs(4 if smoke else 10, seed=0)).unbiased()
        found.append(max(0.0, float(scale.critical)))

    course(replace(settings, steps=int(whole)), tests, look=look)
    return found
