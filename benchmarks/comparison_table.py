"""What `benchmarks.comparison` has found, as Markdown: an overview, and a table for each task.

    seconds to the target = steps to it x seconds of a step

where a step's seconds are those of `benchmarks.comparison_cost`, measured side by side, because the
runs themselves may have shared the machine with others. Without such a measurement there are none.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from natgrad.lab.compare import Comparison
from natgrad.lab.compare.results import ContenderResult
from natgrad.lab.compare.setup import Measure
from natgrad.lab.compare.summary import (
    NONE,
    Way,
    failures_text,
    number_text,
    rate_text,
    spread,
    steps_to,
    three_digits,
    whole,
)
from natgrad.lab.train.contradictions import metrics_of
from natgrad.tables import seconds_text

TUNED, DRAWN, UNTUNED, ADAMW = "naturalmuon", "naturalmuon-mc", "naturalmuon-untuned", "adamw"


@dataclass(frozen=True)
class TaskFindings:
    """A comparison, what a step of each contender costs (by key), who was left out and why, and on
    what it was run."""

    title: str
    found: Comparison
    costs: Mapping[str, float] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    facts: str = ""

    def entry(self, key: str) -> ContenderResult | None:
        return next((one for one in self.found.entries if one.key == key and one.runs), None)

    @property
    def rivals(self) -> list[ContenderResult]:
        return [one for one in self.found.entries if not one.is_natgrads and one.runs]

    def seconds_to(self, entry: ContenderResult) -> Way:
        steps, cost = steps_to(entry), self.costs.get(entry.key)
        if cost is None:
            return Way((), 0)
        return Way(tuple(cost * step for step in steps.values), steps.runs)

    def final(self, entry: ContenderResult) -> float:
        """The median, the lower the better; infinite unless all runs came to their end."""
        values = [run.final for run in entry.runs]
        known = [self.found.measure.low(value) for value in values if value is not None]
        return median(known) if len(known) == len(values) and known else float("inf")


def overview(tasks: Iterable[TaskFindings]) -> str:
    """A row for each task, and what can be said of all of them together."""
    rows, tasks = [], [one for one in tasks if one.found.target is not None and one.rivals]
    for one in tasks:
        fewest = min(one.rivals, key=lambda rival: steps_to(rival).rank)
        cells = [one.title, _target(one), f"{fewest.name}, {steps_to(fewest).text(whole)}"]
        cells += [_steps(one, key) for key in (TUNED, DRAWN, UNTUNED)]
        timed = [rival for rival in one.rivals if rival.key in one.costs]
        least = min(timed, key=lambda rival: one.seconds_to(rival).rank, default=None)
        cells.append(
            NONE if least is None else f"{least.name}, {one.seconds_to(least).text(three_digits)}"
        )
        cells += [_seconds(one, key) for key in (TUNED, DRAWN)]
        rows.append(cells)
    names = ("task", "target", "steps: first rival", "NaturalMuon", "MC", "untuned")
    names = (*names, "seconds: first rival", "NaturalMuon", "MC")
    return "\n".join([_markdown(names, rows), "", *claims(tasks)])


def _steps(one: TaskFindings, key: str) -> str:
    entry = one.entry(key)
    return NONE if entry is None else steps_to(entry).text(whole)


def _seconds(one: TaskFindings, key: str) -> str:
    entry = one.entry(key)
    return NONE if entry is None else one.seconds_to(entry).text(three_digits)


def _target(one: TaskFindings) -> str:
    found = one.found
    assert found.target is not None
    return f"{number_text(found.measure.metric, found.target)} ({found.target_from})"


def claims(tasks: list[TaskFindings]) -> list[str]:
    """What holds on how many tasks, of those in which it can be asked."""
    said = []
    for key, name in ((TUNED, "NaturalMuon"), (DRAWN, "NaturalMuon with a Monte-Carlo Fisher")):
        there = [(one, entry) for one in tasks if (entry := one.entry(key)) is not None]
        if not there:
            continue
        first = sum(
            bool(steps_to(e).values)
            and all(steps_to(e).rank < steps_to(rival).rank for rival in one.rivals)
            for one, e in there
        )
        lower = sum(one.final(e) < min(map(one.final, one.rivals)) for one, e in there)
        text = f"{name} is first in steps on {first} of {len(there)}, ends lowest on {lower}"
        timed = [(one, e) for one, e in there if e.key in one.costs]
        if timed:
            ratios = [_ratio(one, e) for one, e in timed]
            fast = sum(ratio < 1 for ratio in ratios)
            text += (
                f", and is first in seconds on {fast} of {len(timed)}; at worst it takes "
                f"{max(ratios):.2f} times the first rival's seconds"
            )
        said.append(f"{text}.")
    pairs = [
        (one.final(mine), one.final(adamw))
        for one in tasks
        if (mine := one.entry(UNTUNED)) is not None and (adamw := one.entry(ADAMW)) is not None
    ]
    if pairs:
        ahead = sum(mine < adamw for mine, adamw in pairs)
        said.append(
            f"Untuned, NaturalMuon ends lower than AdamW with the best of its learning rates on "
            f"{ahead} of {len(pairs)}."
        )
    return said


def _ratio(one: TaskFindings, entry: ContenderResult) -> float:
    """Of its seconds to those of the first rival; infinite if not all of its runs get there."""
    mine = one.seconds_to(entry)
    others = [one.seconds_to(rival) for rival in one.rivals if rival.key in one.costs]
    there = [way for way in others if way.values]
    if not there:
        return 0.0 if mine.values else float("nan")
    best = min(there, key=lambda way: way.rank)
    if not mine.values or mine.rank[0] > best.rank[0]:
        return float("inf")
    return median(mine.values) / median(best.values)


def details(one: TaskFindings) -> str:
    """All contenders of a task."""
    found = one.found
    second = Measure(_metric(found), "test")
    names = ("optimizer", "lr", found.measure.name, second.name, "a step", "steps to target")
    names = (*names, "seconds to target", "failures")
    rows = []
    for entry in found.entries:
        cost = one.costs.get(entry.key)
        rows.append(
            [
                entry.name,
                rate_text(entry),
                _ends(entry, found.measure),
                _ends(entry, second),
                NONE if cost is None else seconds_text(cost),
                steps_to(entry).text(whole),
                one.seconds_to(entry).text(three_digits),
                failures_text(entry),
            ]
        )
    length = f" of {found.tuning_steps} steps" if found.tuning_steps else ""
    how = f"{found.trials} learning rates tried by each in runs{length} on one seed, then "
    how += f"{len(found.seeds)} other seeds. Target: {_target(one)}."
    out = [f"{key}: {why}" for key, why in one.left_out.items()]
    lines = [f"### {one.title}", "", how, "", _markdown(names, rows)]
    lines += ["", f"Not among them: {'; '.join(out)}."] if out else []
    lines += ["", one.facts] if one.facts else []
    return "\n".join(lines)


def _metric(found: Comparison) -> str:
    known = metrics_of(found.task.loss)
    return found.task.metric if found.task.metric in known else "loss"


def _ends(entry: ContenderResult, measure: Measure) -> str:
    finals = [run.judged(measure, None).final for run in entry.runs]
    kept = [value for value in finals if value is not None]
    lost = f", {len(kept)} of {len(finals)} end" if len(kept) < len(finals) else ""
    if not kept:
        return f"{NONE}{lost}"
    return f"{spread(kept, lambda value: number_text(measure.metric, value))}{lost}"


def _markdown(names: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(names)
    lines = [names, ["---", *["---:"] * (len(names) - 1)], *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
