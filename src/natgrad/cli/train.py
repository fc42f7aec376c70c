"""`natgrad train`: a run from a preset, a file or flags, which can be interrupted and goes on."""

import signal
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from natgrad.cli import rank
from natgrad.cli.flags import (
    FileOption,
    PresetOption,
    asked,
    flag,
    flags_table,
    presets_table,
    section,
    typed,
    with_flags,
)
from natgrad.comm.agreement import raise_on_all_ranks
from natgrad.comm.torchrun import joined
from natgrad.errors import SettingError
from natgrad.lab.train import toml
from natgrad.lab.train.loop import SETTINGS, Outcome
from natgrad.lab.train.loop import train as run
from natgrad.lab.train.progress_line import line, shown
from natgrad.lab.train.settings import Settings

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
        typer.echo(flags_table("natgrad train"))
        return
    if show:
        settings = chosen(name, file, out, given, resume=resume)
        typer.echo(toml.written(settings), nl=False)
        return
    with joined() as (comm, _):
        settings, folder = raise_on_all_ranks(
            comm, lambda: _asked(name, file, out, given, resume=resume)
        )
        tell = shown(lambda text: typer.echo(text, err=True))
        outcome = run(settings, folder, tell, resume=resume)
    said = ending(settings, outcome, folder)
    if not rank():
        typer.echo(said)
    if outcome.signal:
        raise typer.Exit(128 + outcome.signal)
    if outcome.diverged:
        raise typer.Exit(1)


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
    given = typed(given)
    if resume and out is None:
        raise SettingError("--resume goes on with the run in a folder: pass it with --out.")
    own = None if out is None else out / SETTINGS
    going_on = resume and own is not None and own.exists()
    if resume and not going_on and name is None and file is None and not given:
        raise SettingError(f"There is no run in {out} to go on with: name its folder with --out.")
    values = asked(name, file, given)
    if going_on and own is not None:
        values = _gone_on(Settings(**toml.read(own)), values)
    settings = Settings(**values)
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
    for name in given:
        if name != "kfac" and section(name) == "kfac":
            raise SettingError(
                f"{flag(name)} is a setting of K-FAC, which is off: leave it out, or pass --kfac."
            )


def ending(settings: Settings, outcome: Outcome, out: Path) -> str:
    """The last line."""
    where = f"step {outcome.step} of {outcome.steps}"
    test = f": test {line(outcome.metrics)}" if outcome.metrics else ""
    if outcome.diverged:
        return (
            f"Diverged by {where}, the test loss is {outcome.metrics['loss']}: pass a smaller "
            f"--lr and another folder; all of it is in {out}."
        )
    if outcome.signal:
        name = signal.Signals(outcome.signal).name
        return f"Stopped by {name} after {where}; natgrad train --resume --out {out} goes on."
    if outcome.reached:
        value = f"{settings.metric} {settings.target:g}"
        return f"Reached {value} by {where}{test}; all of it is in {out}."
    return f"Done after {where}{test}; all of it is in {out}."


@with_flags(MAIN)
def train(
    *,
    name: PresetOption = None,
    file: FileOption = None,
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

    torchrun --nproc-per-node 2 -m natgrad train --preset digits-cnn --out run
    """
    main(name, file, out, resume, show, listing, flags, given)
