"""Which numbers a setting allows, and the one sentence that says so when it is given another."""

import math
from dataclasses import dataclass
from typing import Any

from natgrad.errors import SettingError


@dataclass(frozen=True)
class Range:
    """Finite numbers from ``low`` to ``high``; an open end leaves its bound out."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, x: float) -> bool:
        above = x > self.low if self.open_low else x >= self.low
        below = x < self.high if self.open_high else x <= self.high
        return math.isfinite(x) and above and below

    def __str__(self) -> str:
        if self.low == -math.inf and self.high == math.inf:
            return "finite"
        if self.high == math.inf:
            return f"finite and {'above' if self.open_low else 'at least'} {self.low:g}"
        if self.low == -math.inf:
            return f"finite and {'below' if self.open_high else 'at most'} {self.high:g}"
        left, right = "(" if self.open_low else "[", ")" if self.open_high else "]"
        return f"in {left}{self.low:g}, {self.high:g}{right}"


POSITIVE = Range(low=0, open_low=True)
AT_LEAST_ONE = Range(low=1)
NOT_NEGATIVE = Range(low=0)
FRACTION = Range(low=0, high=1, open_high=True)


def number(value: Any, name: str, allowed: Range, when: str = "", remedy: str = "") -> float:
    """``value`` as a float; ``when`` and ``remedy`` complete the sentence of the error."""
    try:
        # float() would read "0.1" and True as numbers, which hides a mistake in the caller.
        found = math.nan if isinstance(value, str | bool) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last is torch's
        found = math.nan
    if found not in allowed:
        remedy = remedy or "pass such a number"
        raise SettingError(f"{name} is {value!r}{when} but must be {allowed}: {remedy}.")
    return found


def check_numbers(owner: object, **ranges: Range) -> None:
    for field, allowed in ranges.items():
        number(getattr(owner, field), f"{type(owner).__name__}.{field}", allowed)


def check_whole(value: object, name: str, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise SettingError(
            f"{name} is {value!r} but must be a whole number of at least {low}: pass such an int."
        )


def check_whole_fields(owner: object, *fields: str) -> None:
    for field in fields:
        check_whole(getattr(owner, field), f"{type(owner).__name__}.{field}", low=1)


def check_positive_fields(owner: object, *fields: str, high: float = math.inf) -> None:
    """Finite numbers above 0, and not above ``high``."""
    check_numbers(owner, **dict.fromkeys(fields, Range(low=0, high=high, open_low=True)))
