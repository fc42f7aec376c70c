"""The page's part on a comparison."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from statistics import median

from natgrad.lab.compare import Comparison, sentences, table
from natgrad.lab.compare.results import ContenderResult, Status
from natgrad.lab.compare.summary import (
    Way,
    number_text,
    seconds_to,
    steps_to,
    three_digits,
    whole,
)
from natgrad.lab.report.canvas import number
from natgrad.lab.report.page import (
    comparison_curves,
    html,
    kfac_section,
    medians,
    run_folder,
    settings_table,
    stage_times,
    target_bars,
    tuning,
)
from natgrad.lab.report.page.figure import Picture
from natgrad.lab.report.page.html import Gallery, Section, paragraph
from natgrad.tables import Column, Table


def lead(found: Comparison) -> str:
    names = [one.name for one in comparison_curves.taking_part(found)]
    task = found.task
    return (
        f"{task.network} on {task.data} with batches of {task.batch_size:,}: {len(names)} "
        f"{'optimizers' if len(names) != 1 else 'optimizer'} compared by {found.measure.name}."
    )


def sections(found: Comparison, folder: Path, name: str, gallery: Gallery) -> list[Section]:
    looking = comparison_curves.looks(found, name)
    named = {one.name: looking[one.key] for one in comparison_curves.taking_part(found)}
    first = Section("Result").add(html.cards(_cards(found)), html.table(table(found), named))
    first.add(html.said(sentences(found)))
    if any(_under_way(found, one) for one in comparison_curves.taking_part(found)):
        first.add(paragraph("The comparison is under way: not all runs have ended.", "warning"))
    drawn = [gallery(comparison_curves.curves(found, one, name)) for one in medians.measures(found)]
    made = [first]
    if any(drawn):
        shown = [looking[one.key] for one in comparison_curves.taking_part(found) if one.runs]
        about = "Thin: every seed; strong: their median, in which a failed run counts as worst."
        made.append(Section("Curves").add(html.switches(shown), paragraph(about, "note"), *drawn))
    if goal := gallery(target_bars.pictures(found, name)):
        made.append(Section("To the target").add(goal))
    if tuned := gallery([tuning.picture(found, name)]):
        made.append(Section("Tuning").add(tuned, html.table(_trials(found), named)))
    if lost := comparison_curves.failures(found):
        made.append(Section("Failures").add(_failures(lost)))
    if part := _curvature(found, folder, name, gallery):
        made.append(part)
    made.append(_settings(found))
    return made


def _under_way(found: Comparison, entry: ContenderResult) -> bool:
    """One that none of whose trials came to an end has no rate to run with, and is done."""
    tried = entry.untuned or len(entry.trials) >= found.trials
    ran = len(entry.runs) >= len(found.seeds)
    running = any(run.status is Status.RUNNING for run in (*entry.trials, *entry.runs))
    return running or not tried or (entry.chosen is not None and not ran)


def _cards(found: Comparison) -> list[tuple[str, str, str]]:
    """Who is first, in steps, in seconds and in the end, and where SGD is."""
    made = []
    ways: list[tuple[str, Callable[[ContenderResult], Way], Callable[[float], str]]] = [
        ("fewest steps to the target", steps_to, lambda value: f"{whole(value)} steps"),
        ("least time to the target", seconds_to, lambda value: f"{three_digits(value)} s"),
    ]
    for what, way, text in ways:
        there = [one for one in found.entries if way(one).values]
        if there:
            best = min(there, key=lambda one: way(one).rank)
            said = {one.key: target_bars.said(way(one), text) for one in there}
            made.append((what, best.name, _beside(best, said)))
    ends = {one.key: end for one in found.entries if isfinite(end := _final(found, one))}
    if ends:
        there = [one for one in found.entries if one.key in ends]
        best = min(there, key=lambda one: found.measure.low(ends[one.key]))
        words = "highest" if found.measure.higher else "lowest"
        said = {key: number_text(found.measure.metric, end) for key, end in ends.items()}
        what = f"{words} {found.measure.name} at the end"
        made.append((what, best.name, _beside(best, said)))
    return made


def _beside(best: ContenderResult, said: Mapping[str, str]) -> str:
    """Its number, and that of plain SGD."""
    other = f"; SGD {said['sgd']}" if "sgd" in said and best.key != "sgd" else ""
    return f"{said[best.key]}{other}"


def _final(found: Comparison, entry: ContenderResult) -> float:
    ends = [run.final for run in entry.runs if run.final is not None]
    return median(ends) if ends else float("nan")


def _trials(found: Comparison) -> Table:
    """A row for each contender and trial."""
    rows = []
    for one in found.entries:
        for trial in sorted(one.trials, key=lambda trial: trial.lr):
            shown = "–"
            if trial.final is not None:
                shown = number_text(found.measure.metric, trial.final)
            chosen = "chosen" if trial.lr == one.chosen and not medians.failed(trial) else ""
            status = "" if trial.status is Status.DONE else trial.status.value
            rows.append((one.name, number(trial.lr, 4), shown, status or chosen))
    names = ("optimizer", "learning rate", f"final {found.measure.name}", "")
    columns = (Column(names[0]), *(Column(one, "right") for one in names[1:3]), Column(""))
    return Table("Trials", columns, tuple(rows))


def _failures(lost: Sequence[tuple[str, str, str]]) -> str:
    columns = tuple(map(Column, ("optimizer", "run", "what happened")))
    return f'<div class="settings">{html.table(Table("Failures", columns, tuple(lost)))}</div>'


def _curvature(found: Comparison, folder: Path, name: str, gallery: Gallery) -> Section | None:
    """Of each contender's run whose time is in the middle: its steps last as the table says."""
    inner, rows = [], []
    for i, one in enumerate(comparison_curves.taking_part(found)):
        middle = medians.middle(one)
        if middle is None:
            continue
        step = {stage_times.REST: middle.seconds / middle.steps}
        if one.preconditioned:
            run = run_folder.read(folder / middle.folder)
            total = stage_times.whole(stage_times.stretches(run))
            step = step if total is None else total.of_a_step()
            title = f"{one.name}, seed {middle.seed}"
            part = kfac_section.section(run, f"{name}-{i}", title, gallery)
            if part is not None:
                inner.append(part)
        rows.append((comparison_curves.looks(found, name)[one.key].key, one.name, step))
    if not inner:
        return None
    time: list[Picture | None] = [stage_times.average(rows, f"{name}-step")]
    return Section("K-FAC", [gallery(time)], inner)


def _settings(found: Comparison) -> Section:
    made = Section("Settings").add(settings_table.settings(found.task, "Settings of the task"))
    rows = [
        (
            one.name,
            ", ".join(
                f"{name} {settings_table.text(value)}" for name, value in one.settings.items()
            ),
            one.about,
        )
        for one in found.entries
    ]
    columns = tuple(map(Column, ("optimizer", "its own settings", "what it is")))
    made.add(html.table(Table("Contenders", columns, tuple(rows)), fold=False))
    return made.add(html.listed(list(found.facts.items())))
