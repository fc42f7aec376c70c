"""Pictures of a run: what fell, what rose, and how fast it was allowed to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from natgrad.lab.report.canvas import COLOURS, INK, number
from natgrad.lab.report.page.colours import Owner
from natgrad.lab.report.page.curves import STEPS, Across, Curve, Plot
from natgrad.lab.report.page.curves import seconds as in_seconds
from natgrad.lab.report.page.figure import Picture
from natgrad.lab.report.page.json_files import finite
from natgrad.lab.report.page.run_folder import Run

FALLING = ("loss", "perplexity")  # metrics of which less is better
_KINDS = (
    ("train", Owner("", "batch", INK)),
    ("fit", Owner("", "training data", COLOURS[0])),
    ("test", Owner("", "test data", COLOURS[1])),
)
_NOT_METRICS = ("lr", "seconds", "share")

Points = tuple[list[float], list[float]]


def metrics(runs: Sequence[Run]) -> list[str]:
    """Of all of them, the loss first."""
    named = dict.fromkeys(
        name
        for run in runs
        for line in run.lines
        if line.kind in ("train", "fit", "test")
        for name in line.values
        if name not in _NOT_METRICS
    )
    return sorted(named, key=lambda name: name != "loss")


def points(run: Run, kind: str, name: str, across: Across) -> Points:
    """Where a metric was measured, and what it was; without seconds there are none of these."""
    x, y = [], []
    for line in run.of(kind):
        at = line.step if across is STEPS else line.seconds
        if at is not None and name in line.values:
            value = finite(line.values[name])
            x.append(float(at))
            y.append(float("nan") if value is None else value)
    return x, y


def times(runs: Sequence[Run]) -> list[Across]:
    """Steps, and seconds where they were counted."""
    known = [line.seconds for run in runs for line in run.lines if line.seconds is not None]
    return [STEPS, in_seconds(max(known))] if known else [STEPS]


def curves(run: Run, name: str) -> Iterator[Picture]:
    """Every metric of the batch, of training data and of test data."""
    target = metric = None
    if run.settings is not None and run.settings.target:
        target, metric = run.settings.target, run.settings.metric
    for one in metrics([run]):
        for across in times([run]):
            drawn, ends = [], []
            for kind, owner in _KINDS:
                x, y = points(run, kind, one, across)
                if x:
                    drawn.append(Curve(owner, f"{one}, {owner.name}", x, y, kind == "train"))
                    ends.append(f"{owner.name} ends at {number(y[-1], 3)}")
            if drawn:
                goal = target if one == metric else None
                plot = Plot(one, across, drawn, goal, falling=one in FALLING)
                alt = f"{one} against {across.name}: {', '.join(ends)}."
                title = f"{one.capitalize()} against {across.name}"
                yield plot.picture(f"{name}-{one}-{across.name}", title, alt)


def rate(run: Run, name: str) -> Picture | None:
    x, y = points(run, "train", "lr", STEPS)
    if not x:
        return None
    curve = Curve(Owner("", "learning rate", COLOURS[2]), "learning rate", x, y)
    alt = f"learning rate against steps: from {number(y[0])} to {number(y[-1])}."
    plot = Plot("learning rate", STEPS, [curve], falling=False)
    return plot.picture(name, "Learning rate against steps", alt)


def together(runs: Sequence[tuple[Owner, Run]], name: str) -> Iterator[Picture]:
    """Every metric of several runs, on test data and on training data."""
    every = [run for _, run in runs]
    for one in metrics(every):
        for kind, what in (("test", "test"), ("fit", "training"), ("train", "batch")):
            if kind == "train" and any(run.of("fit") for run in every):
                continue  # which says the same with less noise
            for across in times(every):
                drawn = []
                for owner, run in runs:
                    x, y = points(run, kind, one, across)
                    if x:
                        drawn.append(Curve(owner, f"{owner.name}, {what} {one}", x, y))
                if drawn:
                    plot = Plot(f"{what} {one}", across, drawn, falling=one in FALLING)
                    ends = (f"{c.owner.name} ends at {number(c.y[-1])}" for c in drawn)
                    alt = f"{what} {one} against {across.name}: {', '.join(ends)}."
                    title = f"{what.capitalize()} {one} against {across.name}"
                    yield plot.picture(f"{name}-{kind}-{one}-{across.name}", title, alt)
