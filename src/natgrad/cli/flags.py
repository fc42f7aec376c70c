"""A typed flag for every setting of a run, for all commands that train."""

import inspect
from collections.abc import Callable
from dataclasses import Field, asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from natgrad.errors import SettingError
from natgrad.lab.registry import Makers
from natgrad.lab.train import toml
from natgrad.lab.train.presets import PRESETS, preset
from natgrad.lab.train.settings import Settings, kind, several, words_text
from natgrad.tables import Column, Table

PresetOption = Annotated[
    str | None, typer.Option("--preset", metavar="NAME", help="Settings by name.")
]
FileOption = Annotated[
    Path | None,
    typer.Option("--settings", metavar="FILE", help="A settings.toml, as --show prints it."),
]

Command = Callable[..., None]


def with_flags(
    shown: tuple[str, ...], without: tuple[str, ...] = ()
) -> Callable[[Command], Command]:
    """A command with a flag for every setting in place of its ``**given``, for typer to read; help
    shows only some of them."""

    def made(command: Command) -> Command:
        own = list(inspect.signature(command).parameters.values())[:-1]
        flags = [_option(one, one.name in shown) for one in fields(Settings)]
        parameters = [*own, *(one for one in flags if one.name not in without)]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in parameters}
        return command

    return made


def asked(name: str | None, file: Path | None, given: dict[str, Any]) -> dict[str, Any]:
    """Values of the preset or the file, with the flags over them; not checked yet."""
    if name is not None and file is not None:
        raise SettingError("--preset and --settings are both given: leave one of them out.")
    values = {} if name is None else asdict(preset(name))
    if file is not None:
        values = toml.read(file)
    for one, other in (("steps", "epochs"), ("epochs", "steps")):
        if given.get(one) and not given.get(other):
            values.pop(other, None)
    if given.get("schedule", "steps") != "steps":
        values.pop("decay_at", None)
    return {**values, **given}


def typed(given: dict[str, Any]) -> dict[str, Any]:
    """Flags that were given, with lists in place of what is written with commas."""
    known = {one.name: one for one in fields(Settings)}
    return {
        name: _parsed(known[name], value) if several(known[name]) else value
        for name, value in given.items()
        if value is not None
    }


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def section(name: str) -> str:
    """Of a setting."""
    return {one.name: str(one.metadata["section"]) for one in fields(Settings)}[name]


def flags_table(command: str, without: tuple[str, ...] = ()) -> Table:
    rows = []
    for one in fields(Settings):
        if one.name not in without:
            about = f"{one.metadata['help']} {words_text(one)}".strip()
            rows.append((flag(one.name), _metavar(one), about))
    columns = (Column("flag"), Column(""), Column("what it says"))
    return Table(f"Flags of {command}", columns, tuple(rows))


def presets_table() -> Table:
    rows = tuple((name, one.about) for name, one in PRESETS.items())
    return Table("Presets", (Column("name"), Column("what it is")), rows)


def _metavar(one: Field[Any]) -> str:
    if several(one):
        return "LIST"
    if isinstance(one.metadata["words"], Makers):
        return "VALUE" if one.metadata["numbers"] else "WORD"
    return {str: "NAME", int: "N", float: "NUMBER", bool: "or --no-…"}[kind(one)]


def _parsed(one: Field[Any], text: str) -> tuple[Any, ...]:
    """'35,75' -> (35.0, 75.0)"""
    try:
        return tuple(kind(one)(part) for part in text.split(",") if part)
    except ValueError:
        raise SettingError(
            f"{flag(one.name)} is {text!r}, which is no list of numbers: write one such as "
            "35,75,90."
        ) from None


def _option(one: Field[Any], shown: bool) -> inspect.Parameter:
    """A typed flag that overrides one setting."""
    help = one.metadata["help"]
    given: Any
    if kind(one) is bool and not several(one):
        both = f"{flag(one.name)}/--no-{one.name.replace('_', '-')}"
        given = typer.Option(both, help=help, hidden=not shown, show_default=False)
        hint: Any = bool | None
    else:
        given = typer.Option(
            flag(one.name), metavar=_metavar(one), help=help, hidden=not shown, show_default=False
        )
        hint = (str if several(one) else kind(one)) | None
    return inspect.Parameter(
        one.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[hint, given]
    )
