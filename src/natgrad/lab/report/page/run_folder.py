"""A run's folder: settings, log, and what K-FAC had to tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from natgrad.errors import DataError, SettingError
from natgrad.lab.report.page import json_files
from natgrad.lab.report.page.json_files import finite, numbers
from natgrad.lab.train import Settings, logs, toml
from natgrad.lab.train.kfac_record import NAME as KFAC
from natgrad.lab.train.loop import SETTINGS
from natgrad.tables import Column, Table

TABLES = ("coverage", "memory", "timings", "drift", "traffic")


@dataclass(frozen=True)
class Line:
    """A moment of the log; ``seconds`` of training before it, ``None`` if nobody counted them."""

    kind: str
    step: int
    seconds: float | None
    values: Mapping[str, Any]


@dataclass(frozen=True)
class FactorSpectrum:
    """Eigenvalues of a factor of ``size``, descending; not more than some of them."""

    block: str
    factor: str
    size: int
    values: tuple[float, ...]


@dataclass(frozen=True)
class PlacedFactor:
    name: str
    size: int
    decomposers: tuple[int, ...]
    keepers: tuple[int, ...]


@dataclass(frozen=True)
class PlacedBlock:
    """``workers`` are the ranks that precondition it."""

    name: str
    workers: tuple[int, ...]
    factors: tuple[PlacedFactor, ...]


@dataclass(frozen=True)
class RecordedPlacement:
    strategy: str
    ranks: int
    blocks: tuple[PlacedBlock, ...]


@dataclass(frozen=True)
class Curvature:
    """What K-FAC had to tell at a step."""

    step: int
    tables: Mapping[str, Table]
    spectra: tuple[FactorSpectrum, ...]
    placement: RecordedPlacement


@dataclass(frozen=True)
class Run:
    """``problems`` are sentences on files that are there and could not be read."""

    folder: Path
    settings: Settings | None
    lines: tuple[Line, ...]
    curvature: Curvature | None
    problems: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.folder.absolute().name

    @property
    def step(self) -> int:
        """The last one that the log has."""
        return max((line.step for line in self.lines), default=0)

    def of(self, kind: str) -> list[Line]:
        return [line for line in self.lines if line.kind == kind]


def read(folder: Path) -> Run:
    """Whatever of it can be read: a run may be under way, or may have been killed."""
    settings, problems = None, []
    if (folder / SETTINGS).exists():
        try:
            settings = Settings(**toml.read(folder / SETTINGS))
        except SettingError as error:
            problems.append(str(error))
    lines = tuple(map(_line, _checked_log(folder)))
    curvature = None
    if (folder / KFAC).exists():
        try:
            curvature = json_files.read(folder / KFAC, _curvature)
        except DataError as error:
            problems.append(str(error))
    return Run(folder, settings, lines, curvature, tuple(problems))


def _checked_log(folder: Path) -> list[dict[str, Any]]:
    try:
        return logs.read(folder)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"The log {folder / logs.NAME} cannot be read ({error}): copy a good one there."
        ) from error


def _line(given: dict[str, Any]) -> Line:
    values = dict(given)
    kind, step, seconds = (values.pop(name, None) for name in ("kind", "step", "elapsed"))
    return Line(str(kind), int(finite(step) or 0), finite(seconds), values)


def _curvature(found: dict[str, Any]) -> Curvature:
    spectra = (
        FactorSpectrum(
            str(one["block"]), str(one["factor"]), int(one["size"]), numbers(one["values"])
        )
        for one in found["spectra"]
    )
    return Curvature(
        int(found["step"]),
        {name: _table(found[name]) for name in TABLES if found.get(name)},
        tuple(spectra),
        _placement(found["placement"]),
    )


def _placement(found: Mapping[str, Any]) -> RecordedPlacement:
    blocks = [
        PlacedBlock(
            str(block["name"]),
            _ranks(block["workers"]),
            tuple(
                PlacedFactor(
                    str(one["name"]),
                    int(one["size"]),
                    _ranks(one["decomposers"]),
                    _ranks(one["keepers"]),
                )
                for one in block["factors"]
            ),
        )
        for block in found["blocks"]
    ]
    ranks = int(found["ranks"])
    named = [rank for block in blocks for some in _all(block) for rank in some]
    if not all(0 <= rank < ranks for rank in named):
        raise ValueError(f"a rank is not one of {ranks}")
    return RecordedPlacement(str(found["strategy"]), ranks, tuple(blocks))


def _all(block: PlacedBlock) -> list[tuple[int, ...]]:
    """The ranks that it names."""
    each = (some for one in block.factors for some in (one.decomposers, one.keepers))
    return [block.workers, *each]


def _table(found: Mapping[str, Any]) -> Table:
    columns = tuple(Column(str(one["name"]), one["align"]) for one in found["columns"])
    rows = tuple(tuple(map(str, row)) for row in found["rows"])
    return Table(str(found["title"]), columns, rows, str(found["footer"]))


def _ranks(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(int, values))
