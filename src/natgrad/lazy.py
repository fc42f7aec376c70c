"""Submodules, and names in them, that load when they are first asked for (PEP 562), so that a bare
``import natgrad`` reaches everything and yet imports little."""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

NONE: Mapping[str, str] = MappingProxyType({})


def lazily(
    package: str, modules: Iterable[str], names: Mapping[str, str] = NONE
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of ``package``.

    Arguments:
        package: its name, with dots.
        modules: those below it that are loaded on first use.
        names: other attributes, each with the module below ``package`` that it is taken from.
    """
    known = frozenset(modules)

    def get(name: str) -> Any:
        if name in known:
            return import_module(f"{package}.{name}")  # which makes it an attribute, too
        if name in names:
            found = getattr(import_module(f"{package}.{names[name]}"), name)
            setattr(import_module(package), name, found)  # it is asked for only once
            return found
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def listed() -> list[str]:
        own = vars(import_module(package))
        return sorted({*own, *known, *names})

    return get, listed
