"""Files of JSON that natgrad has written, and one sentence for what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from natgrad.errors import DataError

FORMAT = 1

T = TypeVar("T")


def read(path: Path, make: Callable[[dict[str, Any]], T]) -> T:
    """What ``make`` makes of the file."""
    found = _json(path)
    try:
        return make(found)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise DataError(
            f"The file {path} is not as natgrad writes it ({what}): copy a good one there, or make "
            "the run again."
        ) from error


def finite(value: Any) -> float | None:
    """A number that can be drawn, or nothing."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        return None
    return float(value)


def numbers(values: Iterable[Any]) -> tuple[float, ...]:
    """With NaN for what is none."""
    return tuple(float("nan") if (one := finite(v)) is None else one for v in values)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"The file {path} cannot be read ({error}): copy a good one there, or make the run "
            "again."
        ) from error
    known = found.get("format") if isinstance(found, dict) else None
    if known != FORMAT:
        raise DataError(
            f"The file {path} has format {known} but this version of natgrad reads {FORMAT}: use "
            "the version that wrote it."
        )
    assert isinstance(found, dict)
    return found
