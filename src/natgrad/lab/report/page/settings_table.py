"""Settings as a table: those that differ from their defaults, and all others folded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from typing import Any

from natgrad.lab.report.page.html import details, table
from natgrad.lab.train import Settings
from natgrad.tables import Column, Table

_COLUMNS = tuple(map(Column, ("setting", "value", "default", "meaning")))


def settings(found: Settings, title: str) -> str:
    every = fields(found)
    changed = [one for one in every if getattr(found, one.name) != one.default]
    others = [one for one in every if one not in changed]
    first = Table(title, _COLUMNS, tuple(_rows(found, changed)), "Those that are not the default.")
    rest = Table("Settings at their defaults", _COLUMNS, tuple(_rows(found, others)))
    return (
        f'<div class="settings">{table(first, fold=False)}'
        f"{details(f'{len(others)} settings at their defaults', table(rest, fold=False))}</div>\n"
    )


def _rows(found: Settings, some: Iterable[Field[Any]]) -> Iterable[tuple[str, ...]]:
    for one in some:
        default = "" if one.default is MISSING else text(one.default)
        yield one.name, text(getattr(found, one.name)), default, one.metadata["help"]


def text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple | list):
        return ", ".join(map(text, value)) or "none"
    return str(value) or "none"
