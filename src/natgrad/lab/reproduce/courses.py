"""How something is learnt, step by step: runs in this process that are tested at chosen steps and
timed in CPU seconds, and the search for the learning rate of each.

CPU seconds are those that this process computes for (`time.process_time`), of the steps alone:
other programs of the machine do not count, nor reading and testing.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from math import inf, isfinite
from time import process_time
from typing import Any

import torch

from natgrad.comm import Alone
from natgrad.lab.compare import rate_search
from natgrad.lab.compare.contender import contender_of
from natgrad.lab.train.settings import Settings
from natgrad.lab.train.training import Training

Course = dict[str, Any]  # numbers by name, as JSON keeps them
Look = Callable[[int, Training], None]
LOW = ("loss", "perplexity")


def course(
    settings: Settings,
    tests: Collection[int],
    *,
    stop: tuple[str, float] | None = None,
    look: Look | None = None,
) -> Course:
    """A run. The result has, for every test, ``steps``, CPU ``seconds``, and the metrics by names
    such as "test_loss" and "fit_accuracy".

    Arguments:
        settings: all that the run is told.
        tests: after how many steps it is tested; also after the last one.
        stop: name of a metric and the value at which the run may end.
        look: called at every test with the steps so far and the run.
    """
    run = Training(settings, Alone(), torch.device("cpu"))
    found: Course = {"lr": settings.lr, "steps": [], "seconds": []}
    spent = 0.0
    for step, batches in run.batches(0):
        before = process_time()
        run.step(step, batches)
        spent += process_time() - before
        done = step + 1
        if done not in tests and done != run.steps:
            continue
        metrics = _tested(run)
        if not all(map(isfinite, metrics.values())):
            break
        found["steps"].append(done)
        found["seconds"].append(round(spent, 4))
        for name, value in metrics.items():
            found.setdefault(name, []).append(round(value, 6))
        if look is not None:
            look(done, run)
        if stop is not None and met(stop[0], metrics[stop[0]], stop[1]):
            break
    found["ended"] = bool(found["steps"]) and found["steps"][-1] == run.steps
    if run.kfac is not None:
        found["decompositions"] = decompositions(run)
        run.kfac.detach()
    return found


def _tested(run: Training) -> dict[str, float]:
    with run.tested():
        parts = {"test": run.evaluate(run.task.test), "fit": run.fit()}
    return {f"{on}_{name}": value for on, of in parts.items() for name, value in of.items()}


def decompositions(run: Training) -> int:
    """Of single factors A and G, so far."""
    assert run.kfac is not None
    return sum(b.version for b in run.kfac.blocks if {"A", "G"} <= set(b.decomposes))


def met(name: str, value: float, target: float) -> bool:
    """Whether a metric is as good as a target; of a loss, as low."""
    return value <= target if name.partition("_")[2] in LOW else value >= target


def index_of(found: Course, name: str, target: float) -> int | None:
    """Of the first test at which a metric met the target, if any did."""
    values = found.get(name, [])
    return next((i for i, value in enumerate(values) if met(name, value, target)), None)


def steps_to(found: Course, name: str, target: float) -> float:
    """Infinite if it was not met."""
    index = index_of(found, name, target)
    return inf if index is None else float(found["steps"][index])


def seconds_to(found: Course, name: str, target: float) -> float:
    """CPU seconds; infinite if it was not met."""
    index = index_of(found, name, target)
    return inf if index is None else float(found["seconds"][index])


def last(found: Course, name: str) -> float:
    """At the end; of a run that did not get there, the worst there is."""
    if found["ended"]:
        return float(found[name][-1])
    return inf if name.partition("_")[2] in LOW else -inf


def best_course(
    run: Callable[[float], Course],
    centre: float,
    trials: int,
    score: Callable[[Course], tuple[float, ...]],
) -> Course:
    """The best of so many learning rates, as `natgrad compare` looks for them: the same number for
    every optimizer. Has the rates ``tried``, and whether the best is on their ``edge``.

    Arguments:
        run: makes a run with a learning rate.
        centre: rate of the first one.
        trials: how many.
        score: of a run, the lower the better.
    """
    scores: dict[float, rate_search.Score] = {}
    courses: dict[float, Course] = {}
    for _ in range(trials):
        exponent = rate_search.following(scores)
        courses[exponent] = run(rate_search.rate(centre, exponent))
        scores[exponent] = score(courses[exponent])
    tried = sorted(one["lr"] for one in courses.values())
    edge = bool(rate_search.outermost(scores))
    return {**courses[rate_search.best(scores)], "tried": tried, "edge": edge}


def settings_of(word: str, task: Settings, **others: Any) -> Settings:
    """A task's with an optimizer's usual ones, and its usual learning rate.

    Arguments:
        word: as `natgrad compare --optimizers` takes it, such as "sgd", "adam" or "kfac".
        task: what all share.
        others: fields that are replaced, of K-FAC only where it is there.
    """
    one = contender_of(word)
    kept = others if one.preconditioned else {}
    return replace(one.settings_for(task, one.lr, task.seed), **kept)


def count_text(value: float) -> str:
    """'120', or that a target was not met."""
    return f"{value:,.0f}" if isfinite(value) else "not reached"


def seconds_text(value: float) -> str:
    """'1.2', or that a target was not met."""
    return f"{value:.1f}" if isfinite(value) else "not reached"


def spread_text(values: Sequence[float], text: Callable[[float], str]) -> str:
    """As `item.middle` writes it, where some may be infinite."""
    ordered = sorted(values)
    median = text(ordered[len(ordered) // 2])
    if len(ordered) == 1:
        return median
    return f"{median} ({text(ordered[0])}–{text(ordered[-1])})"


def share_less(value: float, other: float) -> float:
    """``1 - value / other``: by which share it is less. Minus infinity if it is infinite, all of it
    if the other alone is."""
    if not isfinite(value):
        return -inf
    return 1 - value / other if isfinite(other) else 1.0
