"""Names and the objects that they stand for: registered once, and open to ``module:function``.

``Registry("optimizer", …)["sgd"]`` is what was registered under that name, and
``["my_module:Adan"]`` what Python imports by that path, from the current folder too. Names of
`Makers` may have arguments: ``["low-rank(rank=8)"]``.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Generic, TypeGuard, TypeVar

from natgrad.errors import SettingError
from natgrad.lab import calls
from natgrad.lab.calls import Call

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
        return self._found(name)

    def _found(self, name: str) -> T:
        """What was registered, or is imported."""
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


class Makers(Registry[Callable[..., T]]):
    """Functions that make objects, which a name may be followed by arguments for:
    ``makers["low-rank(rank=8)"]()``. An argument that is itself a word of this registry, a path, or
    has arguments, is made by it as well.

    ``given``: examples of what whoever asks for an object hands over, before the arguments that a
    user writes, so that these can be tried as soon as they are read.
    """

    def __init__(
        self,
        kind: str,
        own: str,
        adapt: Callable[[str, Any], Callable[..., T]],
        entries: Mapping[str, Callable[..., T]],
        given: tuple[Any, ...] = (),
    ) -> None:
        self.given = given
        super().__init__(kind, own, adapt, entries)

    def normal(self, value: Any, name: str) -> int | float | str:
        """A number as it is, and a word with its arguments in the one form in which it is kept;
        what is not known is refused, and nothing imported.

        Arguments:
            value: as TOML or a command line has it.
            name: of the setting.
        """
        plain = isinstance(value, str) and _is_plain(value)
        found = Call(value) if plain else calls.from_toml(value, name)
        if isinstance(found, Call):
            self._check(found)
            self._try(found)
            return str(found)
        if isinstance(found, int | float) and not isinstance(found, bool):
            return found
        raise SettingError(f"{name} is {value!r}, which is no {self.kind}: name {self.choices()}.")

    def check(self, name: str) -> None:
        self._check(self._call(name))

    def _try(self, call: Call) -> None:
        """Numbers that are not allowed are refused before a run begins."""
        if _has_path(call):
            return
        try:
            self._made_by(call)(*self.given)
        except (TypeError, ValueError) as error:
            if isinstance(error, SettingError):
                raise
            raise SettingError(
                f"{self.kind.capitalize()} {call} cannot be made ({error}): correct what it is "
                "told."
            ) from error

    def __getitem__(self, name: str) -> Callable[..., T]:
        call = self._call(name)
        self._check(call)
        return self._made_by(call)

    def _call(self, name: str) -> Call:
        found = Call(name) if _is_plain(name) else calls.parsed(name, self.kind)
        if not isinstance(found, Call):
            raise SettingError(f"There is no {self.kind} {name!r}: name {self.choices()}.")
        return found

    def _check(self, call: Call) -> None:
        super().check(call.word)
        if call.word in self:
            allowed = self.arguments(call.word)
            for name, _ in call.arguments:
                if name not in allowed:
                    takes = f"it takes {', '.join(allowed)}" if allowed else "it takes none"
                    raise SettingError(
                        f"There is no argument {name} of {self.kind} {call.word}: {takes}."
                    )
            said = {name for name, _ in call.arguments}
            if missing := [n for n, needed in allowed.items() if needed and n not in said]:
                example = ", ".join(f"{name}=…" for name in missing)
                raise SettingError(
                    f"{self.kind.capitalize()} {call.word} is given no {' and '.join(missing)} but "
                    f"needs it: write {call.word}({example})."
                )
        for _, value in call.arguments:
            if self._nests(value):
                self._check(value)

    def _nests(self, value: calls.Value) -> TypeGuard[Call]:
        """Whether it is made here as well; any other word is a text."""
        if not isinstance(value, Call):
            return False
        return bool(value.arguments) or value.word in self or is_path(value.word)

    def arguments(self, name: str) -> dict[str, bool]:
        """The arguments that a registered word takes, with whether it needs them."""
        found = list(inspect.signature(self.entries()[name]).parameters.values())
        found = found[len(self.given) :]
        return {one.name: one.default is one.empty for one in found}

    def _made_by(self, call: Call) -> Callable[..., T]:
        maker = self._found(call.word)
        if not call.arguments:
            return maker

        def made(*given: Any) -> T:
            named = {name: self._argument(value, given) for name, value in call.arguments}
            return maker(*given, **named)

        return made

    def _argument(self, value: calls.Value, given: tuple[Any, ...]) -> Any:
        if isinstance(value, tuple):
            return tuple(self._argument(one, given) for one in value)
        if self._nests(value):
            return self._made_by(value)(*given)
        return value.word if isinstance(value, Call) else value


def _is_plain(text: str) -> bool:
    """Whether it is no number and has no arguments, so that it is a word, right or wrong."""
    try:
        float(text)
    except ValueError:
        return not set(text) & set("()[]{}=,")
    return False


def _has_path(value: calls.Value) -> bool:
    """Whether something would have to be imported."""
    if isinstance(value, tuple):
        return any(map(_has_path, value))
    if not isinstance(value, Call):
        return False
    return is_path(value.word) or any(_has_path(one) for _, one in value.arguments)


def factories(
    kind: str,
    returns: type[Any],
    entries: Mapping[str, Callable[..., T]],
    given: tuple[Any, ...] = (),
) -> Makers[T]:
    """A registry of functions that make objects of one type. By its path may be named a function
    that takes no arguments but those that are written behind it, a class, or an object as it is."""
    what = kind.capitalize()

    def adapt(path: str, found: Any) -> Callable[..., T]:
        if isinstance(found, returns):
            return lambda *_: found
        made_by = function(path, what, _a(_full_name(returns)), found)
        return lambda *_, **named: call(partial(made_by, **named), path, what, returns)

    return Makers(kind, f"a {returns.__name__} of your own", adapt, entries, given)


def _full_name(kind: type) -> str:
    """As users import it."""
    top = kind.__module__.split(".")[0]
    room = {"torch": {"Module": "torch.nn.", "Optimizer": "torch.optim."}.get(kind.__name__, "")}
    return f"{room.get(top, '')}{kind.__name__}"


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'AEIOaeio' else 'a'} {noun}"
