"""The page's part on a run."""

from __future__ import annotations

from natgrad.lab.compare.summary import number_text
from natgrad.lab.report.canvas import number
from natgrad.lab.report.page import kfac_section, run_plots, settings_table, stage_times
from natgrad.lab.report.page.html import Gallery, Section, cards, paragraph
from natgrad.lab.report.page.json_files import finite
from natgrad.lab.report.page.run_folder import Run
from natgrad.lab.train import Settings, logs
from natgrad.tables import seconds_text

_OPTIMIZERS = {"sgd": "SGD", "adamw": "AdamW", "lars": "LARS", "lamb": "LAMB", "soap": "SOAP"}


def about(run: Run) -> str:
    """convnet on digits, K-FAC with SGD"""
    s = run.settings
    return run.name if s is None else f"{s.network} on {s.data}, {optimizer(s)}"


def optimizer(settings: Settings) -> str:
    name = _OPTIMIZERS.get(settings.optimizer, settings.optimizer.capitalize())
    return f"K-FAC with {name}" if settings.kfac else name


def lead(run: Run) -> str:
    s, step = run.settings, run.step
    if not run.lines:
        return f"The run in {run.folder} has not written a line of its log yet."
    if s is None or not s.steps:
        where = f"{step:,} steps"
    elif step < s.steps:
        where = f"{step:,} of {s.steps:,} steps"
    else:
        where = f"all of its {s.steps:,} steps"
    return f"A run of {about(run)}, after {where}."


def sections(run: Run, name: str, gallery: Gallery) -> list[Section]:
    first = Section("Result").add(cards(_numbers(run)))
    first.add(*(paragraph(text, "warning") for text in run.problems))
    if not run.lines:
        first.add(paragraph("There is nothing to draw yet."))
    found = [first]
    drawn = gallery([*run_plots.curves(run, name), run_plots.rate(run, f"{name}-lr")])
    if drawn:
        found.append(Section("Curves").add(drawn))
    step = stage_times.whole(stage_times.stretches(run))
    row = None if step is None else ("", "a step", step.of_a_step())
    average = None if row is None else stage_times.average([row], f"{name}-stages")
    if part := kfac_section.section(run, name, "K-FAC", gallery, average):
        found.append(part)
    if run.settings is not None:
        found.append(Section("Settings").add(settings_table.settings(run.settings, "Settings")))
    return found


def _numbers(run: Run) -> list[tuple[str, str, str]]:
    """What, the number, and something about it."""
    found = []
    for kind, what in (("test", "test"), ("fit", "training")):
        lines = run.of(kind)
        for metric, value in lines[-1].values.items() if lines else ():
            shown = finite(value)
            text = "not finite" if shown is None else number_text(metric, shown)
            found.append((f"{what} {metric}", text, f"after step {lines[-1].step:,}"))
    if not found and (lines := run.of("train")):
        shown = finite(lines[-1].values.get("loss"))
        text = "not finite" if shown is None else number(shown, 3)
        found.append(("loss of the last batch", text, f"step {lines[-1].step:,}"))
    if timed := [line for line in run.lines if line.seconds is not None and line.step]:
        last = max(timed, key=lambda line: line.step)
        assert last.seconds is not None
        each = seconds_text(last.seconds / last.step)
        found.append(("time of a step", each, f"{seconds_text(last.seconds)} in all"))
    logged = ({"kind": line.kind, "step": line.step, **line.values} for line in run.lines)
    if (part := logs.kfac_share(logged)) is not None:
        found.append(("K-FAC's share of it", f"{part:.0%}", ""))
    if run.curvature is not None and "coverage" in run.curvature.tables:
        words = run.curvature.tables["coverage"].footer
        found.append(("coverage", words.rpartition("(")[2].rstrip(")"), words.partition(" (")[0]))
    return found
