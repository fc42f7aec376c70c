"""`natgrad train`: a run from a preset, a file or flags, which can be interrupted and goes on."""

import inspect
import signal
from collections.abc import Callable
from dataclasses import Field, asdict, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from natgrad.cli import rank
from natgrad.comm.torchrun import joined
from natgrad.errors import SettingError
from natgrad.tables import Column, Table
from natgrad.train import toml
from natgrad.train.loop import SETTINGS, Outcome
from natgrad.train.loop import train as run
from natgrad.train.presets import PRESETS, preset
from natgrad.train.progress import line, shown
from natgrad.train.settings import Settings, kind, several
from natgrad.train.together import together

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
    if show:
        settings = chosen(name, file, out, given, resume=resume)
        typer.echo(toml.written(settings), nl=False)
        return
    with joined() as (comm, _):
        settings, folder = together(comm, lambda: _asked(name, file, out, given, resume=resume))
        tell = shown(lambda text: typer.echo(text, err=True))
        outcome = run(settings, folder, tell, resume=resume)
    said = ending(settings, outcome, folder)
    if not rank():
        typer.echo(said)
    if outcome.signal:
        raise typer.Exit(128 + outcome.signal)


def _asked(
    name: str | None, file: Path | None, out: Path | None, given: dict[str, Any], *, resume: bool
) -> tuple[Settings, Path]:
    settings = chosen(name, file, out, given, resume=resume)
    if out is None:
        raise SettingError("A run needs a folder for its log and checkpoints: pass --out FOLDER.")
    return settings, out


def chosen(
    name: str | None, file: Path | None, out: Path | None, given: dict[str, Any], *, resume: bool
) -> Settings:
    """Settings of the preset, the file or the folder's run, with the flags over them."""
    given = {**given, **_lists(given)}
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
        asked = _gone_on(Settings(**toml.read(own)), asked)
    settings = Settings(**asked)
    if not settings.kfac:
        _refuse_without_kfac(given)
    return settings


def _gone_on(before: Settings, asked: dict[str, Any]) -> dict[str, Any]:
    """What the run was told, with what is asked for now; the loop knows what may not change."""
    values = {**asdict(before), **asked}
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


def _lists(given: dict[str, Any]) -> dict[str, Any]:
    """Those that are written with commas."""
    known = {one.name: one for one in fields(Settings) if several(one)}
    return {name: _parsed(known[name], text) for name, text in given.items() if name in known}


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
    found = {name: value for name, value in given.items() if value is not None}
    main(name, file, out, resume, show, listing, flags, found)
