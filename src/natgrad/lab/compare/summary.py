"""What has been found, as a table and in sentences: medians over seeds, with their spread."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from natgrad.lab.compare.results import Comparison, ContenderResult, Status
from natgrad.lab.compare.setup import LOW, Measure
from natgrad.lab.train.contradictions import metrics_of
from natgrad.tables import Column, Table, seconds_text

NONE = "–"
_GAP = 3  # letters between columns
Text = Callable[[float], str]


@dataclass(frozen=True)
class Way:
    """To the target: ``values`` of those runs that met it, of so many ``runs``."""

    values: tuple[float, ...]
    runs: int

    @property
    def rank(self) -> tuple[float, float]:
        """The lower the sooner: first those whose runs all met it."""
        return (self.runs - len(self.values), median(self.values) if self.values else 0.0)

    def text(self, shown: Text) -> str:
        """With how many of the runs did not meet it: the others' numbers alone would flatter."""
        if not self.values:
            return "never" if self.runs else NONE
        return f"{spread(self.values, shown)}{self.missed}"

    @property
    def missed(self) -> str:
        """If not all of them met it."""
        met = len(self.values)
        return f", {met} of {self.runs} reach it" if 0 < met < self.runs else ""


def steps_to(entry: ContenderResult) -> Way:
    return Way(tuple(float(r.reached.step) for r in entry.runs if r.reached), _ended(entry))


def seconds_to(entry: ContenderResult) -> Way:
    return Way(tuple(r.reached.seconds for r in entry.runs if r.reached), _ended(entry))


def _ended(entry: ContenderResult) -> int:
    return sum(run.status is not Status.RUNNING for run in entry.runs)


def table(found: Comparison) -> Table:
    """A row for each contender: medians over seeds, with their spread.

    Arguments:
        found: a comparison, which may still be under way.
    """
    second = _second(found)
    names = ["optimizer", "lr", found.measure.name]
    names += [second.name] if second is not None else []
    names += ["a step", "steps to target", "seconds to target", "failures"]
    columns = tuple(Column(n, "left" if n in ("optimizer", "failures") else "right") for n in names)
    rows = tuple(_row(found, entry, second) for entry in found.entries)
    return Table(f"{found.name}: {_how(found)}", columns, rows, target_text(found))


def narrow(wide: Table, width: int) -> list[Table]:
    """The same in tables of at most ``width`` letters, if that is possible: each with the first
    column and some of the others."""
    taken = [max(map(len, (c.name, *wide.column(c.name)))) + _GAP for c in wide.columns]
    parts, room = [[0]], width - taken[0]
    for index in range(1, len(taken)):
        if taken[index] > room and len(parts[-1]) > 1:
            parts.append([0])
            room = width - taken[0]
        parts[-1].append(index)
        room -= taken[index]
    return [
        Table(
            wide.title if part is parts[0] else "",
            tuple(wide.columns[index] for index in part),
            tuple(tuple(row[index] for index in part) for row in wide.rows),
            wide.footer if part is parts[-1] else "",
        )
        for part in parts
    ]


def _how(found: Comparison) -> str:
    length = f"{found.task.steps} steps" if found.task.steps else f"{found.task.epochs:g} epochs"
    trials = f"{found.trials} learning rate{'s' if found.trials > 1 else ''} tried by each"
    trials += f" in runs of {found.tuning_steps}" if found.tuning_steps else ""
    seeds = f"{len(found.seeds)} seed{'s' if len(found.seeds) > 1 else ''}"
    return f"{length} of {found.task.batch_size} samples, {trials}, then {seeds}"


def target_text(found: Comparison) -> str:
    if found.target is None:
        return "There is no target, as no run has come to its end."
    value = number_text(found.measure.metric, found.target)
    return f"Target: {found.measure.name} {value}, {found.target_from}."


def _row(found: Comparison, entry: ContenderResult, second: Measure | None) -> tuple[str, ...]:
    def shown(measure: Measure) -> str:
        finals = [r.judged(measure, None).final for r in entry.runs]
        kept = [value for value in finals if value is not None]
        lost = f", {len(kept)} of {ended} end" if len(kept) < ended else ""
        text = spread(kept, lambda value: number_text(measure.metric, value)) if kept else NONE
        return f"{text}{lost}"

    ended = _ended(entry)
    each = [run.seconds / run.steps for run in entry.runs if run.steps]
    return (
        entry.name,
        rate_text(entry),
        *map(shown, [found.measure] + ([second] if second is not None else [])),
        seconds_text(median(each)) if each else NONE,
        steps_to(entry).text(whole),
        seconds_to(entry).text(three_digits),
        failures_text(entry),
    )


def _second(found: Comparison) -> Measure | None:
    """On test data, if the first is on training data: what the task is about."""
    if found.measure.on == "test":
        return None
    known = metrics_of(found.task.loss)
    return Measure(found.task.metric if found.task.metric in known else "loss", "test")


def spread(values: Sequence[float], shown: Text) -> str:
    """'0.12 (0.11–0.14)'"""
    middle = shown(median(values))
    if len(values) == 1:
        return middle
    return f"{middle} ({shown(min(values))}–{shown(max(values))})"


def number_text(metric: str, value: float) -> str:
    return three_digits(value) if metric in LOW else f"{value:.1%}"


def three_digits(value: float) -> str:
    """Digits."""
    return f"{value:#.3g}".rstrip(".") if value else "0"


def whole(value: float) -> str:
    return f"{value:.0f}"


def rate_text(entry: ContenderResult) -> str:
    """'≥ 0.3' if it was the highest that was tried."""
    if entry.chosen is None:
        return NONE
    if entry.untuned:
        return f"{entry.chosen:g}, as it is"
    return f"{ {1: '≥ ', -1: '≤ '}.get(entry.edge, '') }{entry.chosen:g}"


def failures_text(entry: ContenderResult) -> str:
    """'2 of 5 trials diverged, 1 of 3 runs failed'"""
    if entry.missing:
        return "not installed"
    parts = []
    for what, some in (("trial", entry.trials), ("run", entry.runs)):
        for status in (Status.DIVERGED, Status.FAILED):
            count = sum(run.status is status for run in some)
            if count:
                parts.append(f"{count} of {len(some)} {what}{'s' * (len(some) > 1)} {status.value}")
    return ", ".join(parts) or "none"


def sentences(found: Comparison) -> list[str]:
    """Who was first, where natgrad's own lose, and what went wrong.

    Arguments:
        found: a comparison, which may still be under way.
    """
    said = []
    if found.target is not None:
        said = [_first(found), *_losses(found)]
    said += [one.missing for one in found.entries if one.missing]
    said += [_edges(found)] if any(one.edge for one in found.entries) else []
    for entry in found.entries:
        reasons = list(dict.fromkeys(r.said for r in (*entry.trials, *entry.runs) if r.said))
        said += [f"{entry.name} failed: {reason}" for reason in reasons]
    return said


def _first(found: Comparison) -> str:
    there = [one for one in found.entries if steps_to(one).values]
    if not there:
        return "No run met the target."
    steps = min(there, key=lambda one: steps_to(one).rank)
    seconds = min(there, key=lambda one: seconds_to(one).rank)
    in_steps = f"in steps: {steps.name}, {steps_to(steps).text(whole)}"
    in_seconds = f"in seconds: {seconds.name}, {seconds_to(seconds).text(three_digits)}"
    return f"First at the target {in_steps}; {in_seconds}."


def _losses(found: Comparison) -> list[str]:
    said = []
    for entry in found.entries:
        if not entry.is_natgrads or not entry.runs:
            continue
        others = [one for one in found.entries if not one.is_natgrads and one.runs]
        parts = []
        for what, way in (("steps", steps_to), ("seconds", seconds_to)):
            before = [o.name for o in others if way(o).values and way(o).rank < way(entry).rank]
            if before:
                parts.append(f"in {what} {_list(before)}")
        final = _final(found, entry)
        better = [o.name for o in others if _final(found, o) < final]
        if better:
            parts.append(f"in the {found.measure.name} at the end {_list(better)}")
        if parts:
            said.append(f"Ahead of {entry.name}: {'; '.join(parts)}.")
        elif others:
            said.append(f"None of the others is ahead of {entry.name}.")
    return said


def _final(found: Comparison, entry: ContenderResult) -> float:
    """The lower the better."""
    values = [found.measure.low(run.final) for run in entry.runs if run.final is not None]
    return median(values) if values else float("inf")


def _edges(found: Comparison) -> str:
    names = [one.name for one in found.entries if one.edge]
    return (
        f"≥ or ≤: the best learning rate was the outermost that {_list(names)} tried, and a better "
        "one may lie beyond: give more --trials, or another middle with --rates."
    )


def _list(names: Sequence[str]) -> str:
    # Names have commas in them.
    return " and ".join(names) if len(names) < 3 else "; ".join(names)
