"""`natgrad train`: a run from a preset, a file or flags, which can be interrupted and goes on."""

import inspect
import os
import signal
from collections.abc import Callable
from dataclasses import Field, asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from natgrad.errors import DataError, NatgradError, SettingError
from natgrad.tables import Column, Table
from natgrad.train import toml
from natgrad.train.loop import SETTINGS, Outcome
from natgrad.train.loop import train as run
from natgrad.train.presets import PRESETS, preset
from natgrad.train.progress import line, shown
from natgrad.train.settings import FREE, Settings, kind, several

# Flags that help shows; --flags lists all.
_TASK = ("data", "network", "mixup", "erasing")
_TIME = ("batch_size", "micro_batch", "epochs", "steps", "target", "precision", "seed")
MAIN = (*_TASK, *_TIME, "optimizer", "lr", "schedule", "kfac", "damping")


def main(
    name: str | None,
    file: Path | None,
    out: Path | None,
    resume: bool,
    show: bool,
    listing: bool,
    flags: bool,
    given: dict[str, Any],
) -> None:
    """The command, with all typed flags in ``given``."""
    if listing:
        typer.echo(presets_table())
        return
    if flags:
        typer.echo(flags_table())
        return
    settings = chosen(name, file, out, given, resume=resume)
    if show:
        typer.echo(toml.written(settings), nl=False)
        return
    if out is None:
        raise SettingError("A run needs a folder for its log and checkpoints: pass --out FOLDER.")
    outcome = run(settings, out, shown(lambda text: typer.echo(text, err=True)), resume=resume)
    said = ending(settings, outcome, out)
    if not _other_rank():
        typer.echo(said)
    if outcome.signal:
        raise typer.Exit(128 + outcome.signal)


def chosen(
    name: str | None, file: Path | None, out: Path | None, given: dict[str, Any], *, resume: bool
) -> Settings:
    """Settings of the preset, the file or the folder's run, with the flags over them."""
    if name is not None and file is not None:
        raise SettingError("--preset and --settings are both given: leave one of them out.")
    if resume and out is None:
        raise SettingError("--resume goes on with the run in a folder: pass it with --out.")
    own = None if out is None else out / SETTINGS
    going_on = resume and own is not None and own.exists()
    if resume and not going_on and name is None and file is None and not given:
        raise SettingError(f"There is no run in {out} to go on with: name its folder with --out.")
    values = {} if name is None else asdict(preset(name))
    if file is not None:
        values = toml.read(file)
    for one, other in (("steps", "epochs"), ("epochs", "steps")):
        if given.get(one) and not given.get(other):
            values.pop(other, None)
    asked = {**values, **given}
    if going_on and own is not None:
        values = _unchanged(Settings(**toml.read(own)), asked, out)
    else:
        values = asked
    settings = Settings(**values)
    if not settings.kfac:
        _refuse_without_kfac(given)
    return settings


def _unchanged(before: Settings, asked: dict[str, Any], out: Path | None) -> dict[str, Any]:
    """What the run was told, with what may change as it is asked for now."""
    values = asdict(before)
    for name, value in asked.items():
        known = values.get(name)
        value = tuple(value) if isinstance(value, list) else value
        if name in values and name not in FREE and value != known:
            raise SettingError(
                f"{name} is {value!r} but the run in {out} has {known!r}, and would be another: "
                "leave it out to go on, or name another folder with --out."
            )
        values[name] = value
    for one, other in (("steps", "epochs"), ("epochs", "steps")):
        if asked.get(one) and not asked.get(other):
            values[other] = 0
    return values


def _refuse_without_kfac(given: dict[str, Any]) -> None:
    sections = {one.name: one.metadata["section"] for one in fields(Settings)}
    for name in given:
        if name != "kfac" and sections[name] == "kfac":
            raise SettingError(
                f"{flag(name)} is a setting of K-FAC, which is off: leave it out, or pass --kfac."
            )


def ending(settings: Settings, outcome: Outcome, out: Path) -> str:
    """The last line."""
    where = f"step {outcome.step} of {outcome.steps}"
    test = f": test {line(outcome.metrics)}" if outcome.metrics else ""
    if outcome.signal:
        name = signal.Signals(outcome.signal).name
        return f"Stopped by {name} after {where}; natgrad train --resume --out {out} goes on."
    if outcome.reached:
        value = f"{settings.metric} {settings.target:g}"
        return f"Reached {value} by {where}{test}; all of it is in {out}."
    return f"Done after {where}{test}; all of it is in {out}."


def presets_table() -> Table:
    rows = tuple((name, one.about) for name, one in PRESETS.items())
    return Table("Presets", (Column("name"), Column("what it is")), rows)


def flags_table() -> Table:
    rows = []
    for one in fields(Settings):
        help = one.metadata["help"]
        words = ", ".join(one.metadata["words"])
        rows.append((flag(one.name), _metavar(one), f"{help} {words}".strip()))
    columns = (Column("flag"), Column(""), Column("what it says"))
    return Table("Flags of natgrad train", columns, tuple(rows))


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _metavar(one: Field[Any]) -> str:
    if several(one):
        return "LIST"
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


def _option(one: Field[Any]) -> inspect.Parameter:
    """A typed flag that overrides one setting."""
    hidden = one.name not in MAIN
    help = one.metadata["help"]
    given: Any
    if kind(one) is bool and not several(one):
        both = f"{flag(one.name)}/--no-{one.name.replace('_', '-')}"
        given = typer.Option(both, help=help, hidden=hidden, show_default=False)
        hint: Any = bool | None
    else:
        given = typer.Option(
            flag(one.name), metavar=_metavar(one), help=help, hidden=hidden, show_default=False
        )
        hint = (str if several(one) else kind(one)) | None
    return inspect.Parameter(
        one.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[hint, given]
    )


def _with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """``command`` with a flag for every setting, for typer to read."""
    own = list(inspect.signature(command).parameters.values())[:-1]  # all but **given
    parameters = [*own, *map(_option, fields(Settings))]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def _other_rank() -> bool:
    return os.environ.get("RANK", "0") != "0"


@_with_flags
def train(
    *,
    name: Annotated[
        str | None, typer.Option("--preset", metavar="NAME", help="Settings by name.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--settings", metavar="FILE", help="A settings.toml, as --show prints it."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FOLDER", help="For log, checkpoints and settings."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in the folder.")
    ] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Print the settings as a file, and do nothing.")
    ] = False,
    listing: Annotated[bool, typer.Option("--list", help="Print all presets.")] = False,
    flags: Annotated[bool, typer.Option("--flags", help="Print all flags.")] = False,
    **given: Any,
) -> None:
    """Train a network; Ctrl-C saves, and --resume goes on as if nothing had happened.

    natgrad train --preset digits-cnn --out run

    torchrun --no-python --nproc-per-node 2 natgrad train --preset cifar10-resnet32 --out run
    """
    try:
        found = {name: value for name, value in given.items() if value is not None}
        for one in fields(Settings):
            if several(one) and one.name in found:
                found[one.name] = _parsed(one, found[one.name])
        main(name, file, out, resume, show, listing, flags, found)
    except NatgradError as error:
        if not _other_rank():
            typer.echo(f"natgrad: {error}", err=True)
        wrong = isinstance(error, SettingError | DataError)  # and not what went wrong later
        raise typer.Exit(2 if wrong else 1) from None
