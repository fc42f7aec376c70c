"""Objects by the path of their import, ``module:function``, from the current folder too."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from natgrad.errors import SettingError


def is_path(name: str) -> bool:
    """Whether it has the form of one."""
    module, colon, attribute = name.partition(":")
    return bool(module and colon and attribute)


def function(name: str, what: str, returns: str) -> Callable[..., Any]:
    """``what`` it is for and what it ``returns`` are said where it is not found."""
    module, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: object = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise SettingError(
            f"{what} {name!r} cannot be imported ({error}): name a function that Python finds "
            "from here, as module:function."
        ) from error
    if not callable(found):
        raise SettingError(
            f"{what} {name!r} is of type {type(found).__name__} but must be a function that "
            f"returns {returns}: name one as module:function."
        )
    return found
