"""Settings of the planner, checked when given."""

import math

from natgrad.errors import SettingError


def check_whole(owner: object, *fields: str) -> None:
    for field in fields:
        value = getattr(owner, field)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise SettingError(
                f"{type(owner).__name__}.{field} is {value!r} but must be a whole number of at "
                "least 1: pass such an int."
            )


def check_positive(owner: object, *fields: str, high: float = math.inf) -> None:
    """Finite numbers above 0, and not above ``high``."""
    for field in fields:
        value = getattr(owner, field)
        given = isinstance(value, int | float) and not isinstance(value, bool)
        if not given or not math.isfinite(value) or not 0 < value <= high:
            allowed = "finite and above 0" if high == math.inf else f"in (0, {high:g}]"
            raise SettingError(
                f"{type(owner).__name__}.{field} is {value!r} but must be {allowed}: pass such a "
                "number."
            )
