"""The page's part on several runs, or comparisons, beside each other."""

from __future__ import annotations

from collections.abc import Sequence

from natgrad.lab.compare import Comparison
from natgrad.lab.compare.summary import seconds_to, steps_to, three_digits, whole
from natgrad.lab.report.page import run_plots, settings_table
from natgrad.lab.report.page.colours import owners
from natgrad.lab.report.page.html import Gallery, Section, switches, table
from natgrad.lab.report.page.run_folder import Run
from natgrad.lab.train import Settings
from natgrad.tables import Column, Table

_NONE = "–"


def runs(named: Sequence[tuple[str, Run]], gallery: Gallery) -> Section:
    """Their curves in one picture, and the settings in which they differ."""
    looking = owners([(f"run-{i}", name) for i, (name, _) in enumerate(named)])
    drawn = [(owner, run) for owner, (_, run) in zip(looking, named, strict=True)]
    made = Section("Runs together").add(switches(looking))
    made.add(gallery(run_plots.together(drawn, "together")))
    known = [(name, run.settings) for name, run in named if run.settings is not None]
    return made.add(table(_differences(known))) if len(known) > 1 else made


def _differences(known: Sequence[tuple[str, Settings]]) -> Table:
    rows = []
    for name in vars(known[0][1]):
        values = [settings_table.text(getattr(settings, name)) for _, settings in known]
        if len(set(values)) > 1:
            rows.append((name, *values))
    columns = (Column("setting"), *(Column(name) for name, _ in known))
    footer = "" if rows else "All settings are the same."
    return Table("Where their settings differ", columns, tuple(rows), footer)


def comparisons(named: Sequence[tuple[str, Comparison]]) -> Section:
    """What each contender took to the target, by comparison."""
    names = list(dict.fromkeys(one.name for _, found in named for one in found.entries))
    made = Section("Comparisons together")
    for title in ("Steps to the target", "Seconds to the target"):
        rows = [(name, *(_cell(found, name, title) for _, found in named)) for name in names]
        columns = (Column("optimizer"), *(Column(name, "right") for name, _ in named))
        made.add(table(Table(title, columns, tuple(rows)), fold=False))
    return made


def _cell(found: Comparison, name: str, title: str) -> str:
    for one in found.entries:
        if one.name == name and one.runs:
            if title.startswith("Steps"):
                return steps_to(one).text(whole)
            return seconds_to(one).text(three_digits)
    return _NONE
