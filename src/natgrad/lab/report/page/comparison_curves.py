"""Curves of a comparison: every seed, and their median."""

from __future__ import annotations

from natgrad.lab.compare import Comparison
from natgrad.lab.compare.results import ContenderResult
from natgrad.lab.compare.setup import Measure
from natgrad.lab.report.canvas import number
from natgrad.lab.report.page import medians
from natgrad.lab.report.page.colours import Owner, owners
from natgrad.lab.report.page.curves import STEPS, Across, Curve, Plot
from natgrad.lab.report.page.curves import seconds as in_seconds
from natgrad.lab.report.page.figure import Picture
from natgrad.lab.report.page.medians import Middle


def looks(found: Comparison, name: str) -> dict[str, Owner]:
    """By key. Those with K-FAC come first, so that the same colours are theirs on all pages; a page
    that has several comparisons hides them by ``name``."""
    ordered = sorted(found.entries, key=lambda one: not one.preconditioned)
    made = owners([(f"{name}-{one.key}", one.name) for one in ordered])
    return {one.key: owner for one, owner in zip(ordered, made, strict=True)}


def taking_part(found: Comparison) -> list[ContenderResult]:
    return [one for one in found.entries if not one.missing]


def curves(found: Comparison, measure: Measure, name: str) -> list[Picture]:
    """Of one metric, against steps and against seconds."""
    looking = looks(found, name)
    middles = {one.key: medians.curve(one.runs, measure) for one in taking_part(found)}
    ends = [
        f"{one.name} ends at {number(middles[one.key].values[-1], 3)}"
        for one in taking_part(found)
        if middles[one.key].values
    ]
    if not ends:
        return []
    target = found.target if measure == found.measure else None
    longest = max(run.seconds for one in found.entries for run in one.runs)
    made = []
    for across in (STEPS, in_seconds(longest)):
        drawn: list[Curve] = []
        for one in taking_part(found):
            drawn += _seeds(one, measure, looking[one.key], across)
            if len(one.runs) > 1:
                drawn += _middle(one, middles[one.key], looking[one.key], across)
        plot = Plot(measure.name, across, drawn, target, falling=not measure.higher)
        alt = f"{measure.name} against {across.name}: {', '.join(ends)}."
        title = f"{measure.name.capitalize()} against {across.name}"
        made.append(plot.picture(f"{name}-{measure.key}-{across.name}", title, alt))
    return made


def _seeds(one: ContenderResult, measure: Measure, owner: Owner, across: Across) -> list[Curve]:
    drawn = []
    for run in one.runs:
        if points := medians.points(run, measure):
            x = [step if across is STEPS else seconds for step, seconds, _ in points]
            y = [value for _, _, value in points]
            drawn.append(Curve(owner, f"{one.name}, seed {run.seed}", x, y, len(one.runs) > 1))
    return drawn


def _middle(one: ContenderResult, middle: Middle, owner: Owner, across: Across) -> list[Curve]:
    x = middle.steps if across is STEPS else middle.seconds
    title = f"{one.name}, median of {len(one.runs)} seeds"
    return [Curve(owner, title, x, middle.values)] if x else []


def failures(found: Comparison) -> list[tuple[str, str, str]]:
    """Who, in which of the runs, and what happened."""
    listed = []
    for one in found.entries:
        named = [(f"trial, learning rate {number(run.lr, 4)}", run) for run in one.trials]
        named += [(f"seed {run.seed}", run) for run in one.runs]
        for what, run in named:
            if medians.failed(run):
                said = f"{run.status.value} after {run.steps:,} steps"
                listed.append((one.name, what, f"{said}: {run.said}" if run.said else said))
    return listed
