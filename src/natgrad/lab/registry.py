"""Names and the objects that they stand for: registered once, and open to ``module:function``.

``Registry("optimizer", …)["sgd"]`` is what was registered under that name, and
``["my_module:Adan"]`` what Python imports by that path, from the current folder too.
"""

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from natgrad.errors import SettingError

T = TypeVar("T")

PATH = "module:function"


class Registry(Generic[T]):
    """Objects of one ``kind``, such as "optimizer", by name, in the order of their registration.

    ``own`` says what may be named by an import path, and ``adapt(path, found)`` makes of what was
    imported there what is registered here.
    """

    def __init__(
        self,
        kind: str,
        own: str,
        adapt: Callable[[str, Any], T],
        entries: Mapping[str, T] | None = None,
    ) -> None:
        self.kind, self.own, self.adapt = kind, own, adapt
        self._entries: dict[str, T] = {}
        for name, thing in (entries or {}).items():
            self.add(name, thing)

    def add(self, name: str, thing: T) -> T:
        """Register ``thing``; a name stands for one object."""
        if name in self._entries or is_path(name) or not name:
            why = "stands for another one already" if name in self._entries else "cannot be one"
            raise SettingError(f"The name {name!r} of a {self.kind} {why}: register it by another.")
        self._entries[name] = thing
        return thing

    def entries(self) -> Mapping[str, T]:
        """Those that have a name."""
        return self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries())

    def __contains__(self, name: str) -> bool:
        """Whether it is registered, which a path never is."""
        return name in self.entries()

    def check(self, name: str) -> None:
        """That it is a name or has the form of a path; nothing is imported."""
        if name not in self and not is_path(name):
            raise SettingError(f"There is no {self.kind} {name!r}: name {self.choices()}.")

    def __getitem__(self, name: str) -> T:
        self.check(name)
        known = self.entries()
        if name in known:
            return known[name]
        return self.adapt(name, imported(name, self.kind.capitalize()))

    def choices(self) -> str:
        """'one of sgd, adamw, or a function … as module:function'"""
        return f"one of {', '.join(self)}, or {self.own} as {PATH}"

    def help(self) -> str:
        """For one line of help: 'sgd, adamw, or module:function'."""
        return f"{', '.join(self)}, or {PATH}"


def is_path(name: str) -> bool:
    """Whether it has the form ``module:function``."""
    module, colon, attribute = name.partition(":")
    return bool(module and colon and attribute)


def imported(path: str, what: str) -> Any:
    """The object at ``module:name``; ``what`` it is for is said where it is not found."""
    module, _, attribute = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise SettingError(
            f"{what} {path!r} cannot be imported ({error}): name a function that Python finds "
            f"from here, as {PATH}."
        ) from error
    return found


def function(path: str, what: str, returns: str, found: Any = None) -> Callable[..., Any]:
    """The function at ``path``, or ``found`` there before; what it ``returns`` is said where there
    is something else."""
    found = imported(path, what) if found is None else found
    if not callable(found):
        raise SettingError(
            f"{what} {path!r} is of type {type(found).__name__} but must be a function that "
            f"returns {returns}: name one as {PATH}."
        )
    made: Callable[..., Any] = found
    return made


def call(
    made_by: Callable[..., Any],
    path: str,
    what: str,
    returns: type[T],
    *arguments: Any,
    takes: str = "takes no arguments",
    gives: str = "",
) -> T:
    """What a function of the user's returns, which must be of this type."""
    kind = gives or _a(_full_name(returns))
    try:
        made = made_by(*arguments)
    except SettingError:  # says already what to do
        raise
    except Exception as error:
        raise SettingError(
            f"{what} {path!r} could not be built ({type(error).__name__}: {error}): name a "
            f"function that {takes} and returns {kind}."
        ) from error
    if not isinstance(made, returns):
        raise SettingError(
            f"{what} {path!r} gives an object of type {type(made).__name__} but must give "
            f"{kind}: name a function that returns one."
        )
    return made


def factories(
    kind: str, returns: type[Any], entries: Mapping[str, Callable[..., T]]
) -> Registry[Callable[..., T]]:
    """A registry of functions that make objects of one type. By its path may be named a function
    without arguments, a class, or an object as it is."""
    what = kind.capitalize()

    def adapt(path: str, found: Any) -> Callable[..., T]:
        if isinstance(found, returns):
            return lambda *_: found
        made_by = function(path, what, _a(_full_name(returns)), found)
        return lambda *_: call(made_by, path, what, returns)

    return Registry(kind, f"a {returns.__name__} of your own", adapt, entries)


def _full_name(kind: type) -> str:
    """As users import it."""
    top = kind.__module__.split(".")[0]
    room = {"torch": {"Module": "torch.nn.", "Optimizer": "torch.optim."}.get(kind.__name__, "")}
    return f"{room.get(top, '')}{kind.__name__}"


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'AEIOaeio' else 'a'} {noun}"
