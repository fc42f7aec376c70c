"""The middle of several seeds, among which one that failed is worse than all that did not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from statistics import median

from natgrad.lab.compare import Comparison
from natgrad.lab.compare.results import ComparedRun, ContenderResult, Status
from natgrad.lab.compare.setup import Measure


@dataclass(frozen=True)
class Middle:
    """A curve through the medians over seeds, as far as they are finite."""

    steps: tuple[float, ...]
    seconds: tuple[float, ...]
    values: tuple[float, ...]


def curve(runs: Sequence[ComparedRun], measure: Measure) -> Middle:
    """At every step that a run has; of those under way, as far as they are."""
    worst = -inf if measure.higher else inf
    found: dict[float, list[tuple[float, float]]] = {}
    for run in runs:
        for step, seconds, value in points(run, measure):
            found.setdefault(step, []).append((seconds, value if isfinite(value) else worst))
    rows = []
    for step in sorted(found):
        lost = sum(failed(run) and step > _end(run, measure) for run in runs)
        middle = median([value for _, value in found[step]] + [worst] * lost)
        if isfinite(middle):
            rows.append((step, median(seconds for seconds, _ in found[step]), middle))
    steps, seconds_, values = zip(*rows, strict=True) if rows else ((), (), ())
    return Middle(steps, seconds_, values)


def points(run: ComparedRun, measure: Measure) -> list[tuple[float, float, float]]:
    """Step, second and value of what was measured."""
    values = run.curve.values.get(measure.key, ())
    return list(zip(run.curve.steps, run.curve.seconds, values, strict=False))


def failed(run: ComparedRun) -> bool:
    return run.status in (Status.DIVERGED, Status.FAILED)


def _end(run: ComparedRun, measure: Measure) -> float:
    return max((step for step, _, _ in points(run, measure)), default=-1.0)


def middle(entry: ContenderResult) -> ComparedRun | None:
    """The run whose steps took as long as those of the others, in the middle."""
    known = sorted((run.seconds / run.steps, i) for i, run in enumerate(entry.runs) if run.steps)
    return entry.runs[known[(len(known) - 1) // 2][1]] if known else None


def measures(found: Comparison) -> list[Measure]:
    """The compared one, then all of test data."""
    keys = dict.fromkeys(
        key for entry in found.entries for run in entry.runs for key in run.curve.values
    )
    every = (Measure(metric, on) for on, _, metric in (key.partition("_") for key in keys))
    return [found.measure, *(one for one in every if one.on == "test" and one != found.measure)]
