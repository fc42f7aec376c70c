"""Words with arguments, which nest: ``growing(every=5)`` on a command line and
``{growing = {every = 5}}`` in a file are one `Call`.

    value = number | true | false | "text" | [value, …] | word | word(name=value, …)

Nothing here knows which words there are: that is a `Registry`'s business.
"""

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Union

from natgrad.errors import SettingError

Value = Union[bool, int, float, str, "Call", tuple["Value", ...]]

_WORD = r"[A-Za-z_][\w.:-]*"
_TOKEN = re.compile(
    rf"\s*(?:(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?![\w.]))"
    rf'|(?P<word>{_WORD})|(?P<text>"(?:[^"\\]|\\.)*")|(?P<mark>[()\[\],=]))'
)
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_TRUTH = {"true": True, "false": False}


@dataclass(frozen=True)
class Call:
    """A word, and what is said of it.

    Arguments:
        word: a registered name, or ``module:function``.
        arguments: names and values, in the order in which they were written.
    """

    word: str
    arguments: tuple[tuple[str, Value], ...] = ()

    def __str__(self) -> str:
        return text(self)


def text(value: Value) -> str:
    """As on a command line; `parsed` reads it back.

    Arguments:
        value: that is to be written.
    """
    if isinstance(value, Call):
        given = ", ".join(f"{name}={text(one)}" for name, one in value.arguments)
        return f"{value.word}({given})" if given else value.word
    if isinstance(value, tuple):
        return f"[{', '.join(map(text, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return json.dumps(value) if isinstance(value, str) else repr(value)


def toml(value: Value) -> str:
    """As in a file of settings; `from_toml` reads it back.

    Arguments:
        value: that is to be written.
    """
    if isinstance(value, Call):
        if not value.arguments:
            return json.dumps(value.word)
        given = ", ".join(f"{name} = {toml(one)}" for name, one in value.arguments)
        word = value.word if _BARE.fullmatch(value.word) else json.dumps(value.word)
        return f"{{{word} = {{{given}}}}}"
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, str):  # in quotes of its own, so that it is not taken for a word
        return json.dumps(text(value))
    return text(value)


def from_toml(found: Any, name: str) -> Value:
    """What TOML has read.

    Arguments:
        found: a number, a text as for `parsed`, a list of such, or a table with one word.
        name: of the setting, for the sentence where it cannot be read.
    """
    if isinstance(found, Mapping):
        word, given = next(iter(found.items()), ("", None))
        if len(found) != 1 or not isinstance(given, Mapping):
            raise SettingError(
                f"{name} is a table with the keys {', '.join(found) or 'none'} but must have one "
                "word with a table of its arguments: write such as {growing = {every = 5}}."
            )
        return Call(word, tuple((key, from_toml(one, name)) for key, one in given.items()))
    if isinstance(found, list | tuple):
        return tuple(from_toml(one, name) for one in found)
    if isinstance(found, str):
        return parsed(found, name)
    if isinstance(found, bool | int | float):
        return found
    raise SettingError(
        f"{name} is {found!r} but must be a number, a text or a table with one word: write such as "
        "{growing = {every = 5}}."
    )


def parsed(given: str, name: str) -> Value:
    """What stands on a command line.

    Arguments:
        given: a value as above, or a table of TOML.
        name: of the setting, for the sentence where it cannot be read.
    """
    if given.lstrip().startswith("{"):
        try:
            return from_toml(tomllib.loads(f"value = {given}")["value"], name)
        except tomllib.TOMLDecodeError as error:
            raise SettingError(
                f"{name} is {given!r}, which is no table of TOML ({error}): write such as "
                "{growing = {every = 5}}, or growing(every=5)."
            ) from error
    reader = _Reader(given, name)
    value = reader.value()
    if reader.rest():
        reader.stuck()
    return value


class _Reader:
    """Reads a text from left to right."""

    def __init__(self, given: str, name: str) -> None:
        self.given, self.name, self.at = given, name, 0

    def rest(self) -> str:
        return self.given[self.at :].strip()

    def stuck(self) -> NoReturn:
        where = f"at {self.rest()!r}" if self.rest() else "as it ends too soon"
        raise SettingError(
            f"{self.name} is {self.given!r}, which cannot be read {where}: write a number, a word, "
            "or a word with its arguments, such as growing(every=5)."
        )

    def token(self) -> tuple[str, str]:
        """Its kind and what it says."""
        found = _TOKEN.match(self.given, self.at)
        if found is None or found.lastgroup is None:
            self.stuck()
        self.at = found.end()
        return found.lastgroup, found[found.lastgroup]

    def takes(self, mark: str) -> bool:
        """Whether it comes next; then it is behind us."""
        found = _TOKEN.match(self.given, self.at)
        if found is None or found["mark"] != mark:
            return False
        self.at = found.end()
        return True

    def value(self) -> Value:
        before = self.at
        kind, said = self.token()
        if kind == "number":
            return int(said) if re.fullmatch(r"[+-]?\d+", said) else float(said)
        if kind == "text":
            return str(json.loads(said))
        if kind == "word" and said in _TRUTH:
            return _TRUTH[said]
        if kind == "word":
            return Call(said, self._arguments() if self.takes("(") else ())
        if said == "[":
            return self._list()
        self.at = before
        self.stuck()

    def _arguments(self) -> tuple[tuple[str, Value], ...]:
        found: dict[str, Value] = {}
        while not self.takes(")"):
            if found and not self.takes(","):
                self.stuck()
            before = self.at
            kind, name = self.token()
            if kind != "word" or name in found or not self.takes("="):
                self.at = before
                self.stuck()
            found[name] = self.value()
        return tuple(found.items())

    def _list(self) -> tuple[Value, ...]:
        found: list[Value] = []
        while not self.takes("]"):
            if found and not self.takes(","):
                self.stuck()
            found.append(self.value())
        return tuple(found)
