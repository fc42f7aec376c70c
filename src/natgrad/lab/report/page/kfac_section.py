"""The part of a page on K-FAC in one run: time, drift, spectra, placement, and its tables."""

from __future__ import annotations

from natgrad.lab.report.page import factor_plots, placement_map, stage_times
from natgrad.lab.report.page.figure import Picture
from natgrad.lab.report.page.html import Gallery, Section, details, paragraph, table
from natgrad.lab.report.page.run_folder import Curvature, Run

_OPEN = ("coverage", "memory")
_TABLES = (*_OPEN, "timings", "drift", "traffic")
_NAMED = 8  # factors without a spectrum


def section(
    run: Run, name: str, title: str, gallery: Gallery, average: Picture | None = None
) -> Section | None:
    """``None`` for a run without K-FAC; ``average`` is the picture of an average step."""
    found = stage_times.stretches(run)
    along = stage_times.along(found, f"{name}-time") if len(found) > 1 else None
    told = run.curvature
    pictures = [average, *([along] if average else []), *factor_plots.drift(run, f"{name}-drift")]
    if told is not None:
        pictures += factor_plots.spectra(told.spectra, f"{name}-spectra", told.step)
    pictures += [] if average else [along]
    pictures += [] if told is None else [placement_map.picture(told.placement, f"{name}-placement")]
    drawn = [gallery(pictures), *([] if told is None else [_without(told), *_tables(told)])]
    return Section(title).add(*drawn) if any(drawn) else None


def _without(found: Curvature) -> str:
    """Which factors have no spectrum: they were too large, or had seen nothing yet."""
    known = {(one.block, one.factor) for one in found.spectra}
    others = [
        f"{factor.name} of {block.name}"
        for block in found.placement.blocks
        for factor in block.factors
        if (block.name, factor.name) not in known
    ]
    if not others:
        return ""
    some = ", ".join(others[:_NAMED]) + (", …" if len(others) > _NAMED else "")
    return paragraph(f"Eigenvalues of {len(others)} factors are not known: {some}.", "note")


def _tables(found: Curvature) -> list[str]:
    """What was written with the last checkpoint."""
    parts = []
    if found.placement.blocks:
        whole = table(placement_map.table(found.placement), fold=False)
        parts.append(details("Placement as a table", whole))
    for one in _TABLES:
        shown = found.tables.get(one)
        if shown is not None and shown.rows:
            drawn = table(shown, fold=one in _OPEN)
            parts.append(drawn if one in _OPEN else details(shown.title, drawn))
    return parts
