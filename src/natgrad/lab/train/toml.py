"""Settings as a TOML file, which reads back as the same settings."""

import tomllib
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from natgrad.errors import SettingError
from natgrad.lab import calls
from natgrad.lab.registry import Makers
from natgrad.lab.train.settings import Settings, words_text


def written(settings: Settings) -> str:
    """Every value, below the name of its section and beside what it means."""
    lines: list[str] = []
    section = ""
    for one in fields(settings):
        if one.metadata["section"] != section:
            section = one.metadata["section"]
            lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        text = f"{one.name} = {_value(one, getattr(settings, one.name))}"
        words = words_text(one)
        about = one.metadata["help"] + (f" One of {words}." if words else "")
        lines.append(f"{text:<32} # {about}")
    return "\n".join(lines) + "\n"


def read(path: Path) -> dict[str, Any]:
    """The values of a file, by name; not checked, as others may override them."""
    return values(parsed(path), path)


def parsed(path: Path) -> dict[str, Any]:
    """A file as it is."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(
            f"The settings {path} cannot be read ({error.strerror}): name a file that is there."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(
            f"The settings {path} are no TOML ({error}): write a file as --show prints it."
        ) from error


def values(found: dict[str, Any], path: Path) -> dict[str, Any]:
    """Those of all sections that the file ``path`` has, by name."""
    sections = {one.name: one.metadata["section"] for one in fields(Settings)}
    named: dict[str, Any] = {}
    for section, entries in found.items():
        if not isinstance(entries, dict):
            raise _unknown(path, section, "stands outside of a section")
        for name, value in entries.items():
            if name not in sections:
                raise _unknown(path, name, "is no setting")
            if sections[name] != section:
                raise _unknown(path, name, f"belongs to [{sections[name]}], not to [{section}]")
            named[name] = value
    return named


def _unknown(path: Path, name: str, why: str) -> SettingError:
    return SettingError(
        f"{name} in the settings {path} {why}: write a file as natgrad train --show prints it."
    )


def _value(one: Field[Any], value: Any) -> str:
    """A word with arguments as a table, which may have others inside."""
    if isinstance(one.metadata["words"], Makers) and isinstance(value, str) and value:
        return calls.toml(calls.parsed(value, one.name))
    return literal(value)


def literal(value: Any) -> str:
    """As TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, str):
        escaped = "".join(_escaped(letter) for letter in value)
        return f'"{escaped}"'
    return repr(value)  # of a float the shortest that reads back as the same


def _escaped(letter: str) -> str:
    if letter in '\\"':
        return f"\\{letter}"
    return letter if letter.isprintable() else f"\\U{ord(letter):08X}"
