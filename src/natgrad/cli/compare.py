"""`natgrad compare`: several optimizers on one task, with as many trials for each."""

import shutil
import signal
from dataclasses import dataclass, replace
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
    typed,
    with_flags,
)
from natgrad.comm.agreement import raise_on_all_ranks
from natgrad.comm.torchrun import joined
from natgrad.errors import SettingError
from natgrad.lab.compare import (
    CONTENDERS,
    Comparison,
    ComparisonSetup,
    Contender,
    sentences,
    table,
)
from natgrad.lab.compare import (
    compare as run,
)
from natgrad.lab.compare.contender import (
    OPTIMIZER_SETTINGS,
    chosen_contenders,
    key_of,
    preset_contender,
)
from natgrad.lab.compare.progress_bar import shown
from natgrad.lab.compare.setup import NAME, read
from natgrad.lab.compare.summary import narrow
from natgrad.lab.train.settings import Settings
from natgrad.tables import Column, Table

# Flags of the task that help shows; --flags lists all.
MAIN = ("data", "network", "batch_size", "epochs", "steps", "weight_decay", "seed")
ELSE = ("target", "metric")  # which are others here
MOST_TRIALS = 9  # if neither --trials nor --most-trials is given
_DECIDED = ("evaluate_every", "checkpoint_every", "fit_samples")  # unless flags or a file say more


@dataclass(frozen=True)
class Options:
    """Those of the comparison; None was not given."""

    optimizers: str | None
    trials: int | None
    most_trials: int | None
    tuning_steps: int | None
    seeds: int | None
    metric: str | None
    on: str | None
    target: float | None
    rates: str | None
    threads: int | None
    name: str | None

    def plain(self) -> dict[str, Any]:
        """What is given and goes to the setup as it is."""
        names = ("trials", "most_trials", "tuning_steps", "seeds", "metric", "on", "target")
        found = {name: getattr(self, name) for name in (*names, "threads", "name")}
        return {name: value for name, value in found.items() if value is not None}

    def beginning(self) -> dict[str, Any]:
        """The same for a comparison that begins: where nothing is said of trials, their number
        follows from what they find."""
        found = self.plain()
        return {**({} if "trials" in found else {"most_trials": MOST_TRIALS}), **found}


def comparison_setup(
    name: str | None,
    file: Path | None,
    out: Path | None,
    options: Options,
    given: dict[str, Any],
    *,
    resume: bool,
) -> tuple[ComparisonSetup, Path]:
    """What is asked, by flags or by the comparison in the folder."""
    if out is None:
        raise SettingError("A comparison needs a folder for runs and results: pass --out FOLDER.")
    given = typed(given)
    before = read(out / NAME) if resume and (out / NAME).exists() else None
    if before is not None and name is None and file is None:
        return _gone_on(before, options, given), out
    if resume and name is None and file is None and not given:
        raise SettingError(
            f"There is no comparison in {out} to go on with: name its folder with --out."
        )
    values = asked(name, file, given)
    if name is not None:
        values |= {one: 0 for one in _DECIDED if one not in given}
    task = Settings(**values)
    known = {**CONTENDERS, "preset": preset_contender(task)}
    chosen = _chosen(options, known, tuple(CONTENDERS))
    _refuse_unused(given, chosen)
    title = name or (file.stem if file is not None else task.data)
    return ComparisonSetup(task, chosen, **{"name": title, **options.beginning()}), out


def _gone_on(before: ComparisonSetup, options: Options, given: dict[str, Any]) -> ComparisonSetup:
    for one in given:
        if one in OPTIMIZER_SETTINGS:
            raise SettingError(
                f"{flag(one)} is given but what optimizers are told stays as it began: leave it "
                "out to go on, or name another folder with --out."
            )
    known = CONTENDERS | {one.key: one for one in before.contenders}
    keys = tuple(one.key for one in before.contenders)
    task = replace(before.task, **given)
    return replace(before, task=task, contenders=_chosen(options, known, keys), **options.plain())


def _chosen(
    options: Options, known: dict[str, Contender], usual: tuple[str, ...]
) -> tuple[Contender, ...]:
    words = usual
    if options.optimizers is not None:
        words = tuple(part.strip() for part in options.optimizers.split(",") if part.strip())
    found = chosen_contenders(words, known)
    rates, keys = _rates(options.rates or ""), [one.key for one in found]
    for word in rates:
        if key_of(word) not in keys:
            raise SettingError(
                f"--rates names {word!r}, which does not take part: name some of "
                f"{', '.join(words)}."
            )
    middle = {key_of(word): lr for word, lr in rates.items()}
    return tuple(replace(one, lr=middle.get(one.key, one.lr)) for one in found)


def _rates(text: str) -> dict[str, float]:
    """'kfac=0.1,sgd=1' -> {"kfac": 0.1, "sgd": 1.0}"""
    found = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        try:
            found[key.strip()] = float(value)
        except ValueError:
            raise SettingError(
                f"--rates has {part!r}, which is no optimizer with its learning rate: write some "
                "such as kfac=0.1,sgd=1."
            ) from None
    return found


def _refuse_unused(given: dict[str, Any], chosen: tuple[Contender, ...]) -> None:
    if any(one.key == "preset" for one in chosen):
        return
    for name in given:
        if name in OPTIMIZER_SETTINGS:
            instead = "--rates" if name == "lr" else "preset among --optimizers"
            raise SettingError(
                f"{flag(name)} is for one optimizer alone, that of the preset, which does not take "
                f"part: leave it out, or use {instead}."
            )


def listing_table(task: Settings) -> Table:
    rows = [
        (one.key, one.name, f"{one.lr:g}", one.missing() or one.about)
        for one in (*CONTENDERS.values(), preset_contender(task))
    ]
    columns = (Column("key"), Column("name"), Column("lr", "right"), Column("what it is"))
    footer = (
        "lr is the middle of the learning rates that are tried. All but preset by default. Your "
        "own as module:function; kfac- before a name puts K-FAC in front of that optimizer."
    )
    return Table("Optimizers", columns, tuple(rows), footer)


def said(found: Comparison, out: Path) -> str:
    """What stands at the end."""
    if found.signal:
        name = signal.Signals(found.signal).name
        here = [one for one in found.entries if not one.missing]
        done = sum(len(one.trials) + len(one.runs) for one in here)
        trials = sum(0 if one.untuned else found.trials for one in here)
        runs = f"{done} of {trials + len(here) * len(found.seeds)} runs"
        return f"Stopped by {name} after {runs}; natgrad compare --resume --out {out} goes on."
    wide = table(found)
    columns = shutil.get_terminal_size(fallback=(10**6, 24)).columns
    drawn = map(str, narrow(wide, columns))
    return "\n".join(
        [*drawn, "", *sentences(found), f"All of it is in {out}; natgrad report {out} draws it."]
    )


@with_flags(MAIN, without=ELSE)
def compare(
    *,
    name: PresetOption = None,
    file: FileOption = None,
    optimizers: Annotated[
        str | None,
        typer.Option(
            "--optimizers", metavar="LIST", help="Of --list, or module:function, with commas."
        ),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            "--trials", help="Learning rates that each tries; by default 5 to 9.", metavar="N"
        ),
    ] = None,
    most_trials: Annotated[
        int | None,
        typer.Option(
            "--most-trials", help="More for all while a best rate is not enclosed.", metavar="N"
        ),
    ] = None,
    tuning_steps: Annotated[
        int | None,
        typer.Option(
            "--tuning-steps", help="Length of the trials, if they are shorter.", metavar="N"
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            "--seeds", help="Further runs with the best of them; by default 3.", metavar="N"
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            "--metric", help="By what they are compared; by default loss.", metavar="NAME"
        ),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option("--on", help="fit (training data, the default) or test.", metavar="WHICH"),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            "--target",
            help="The metric to get to; by default where the best rival ends.",
            metavar="NUMBER",
        ),
    ] = None,
    rates: Annotated[
        str | None,
        typer.Option(
            "--rates", metavar="LIST", help="Other rates to begin with, as kfac=0.1,sgd=1."
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", help="That torch uses.", metavar="N")
    ] = None,
    title: Annotated[
        str | None,
        typer.Option("--name", metavar="TEXT", help="Of the comparison; by default the preset's."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="For runs and results.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with what is in the folder.")
    ] = False,
    listing: Annotated[bool, typer.Option("--list", help="Print all optimizers.")] = False,
    flags: Annotated[bool, typer.Option("--flags", help="Print all flags of the task.")] = False,
    **given: Any,
) -> None:
    """Compare optimizers on one task; Ctrl-C saves, and --resume goes on.

    natgrad compare --preset digits-cnn --optimizers sgd,kfac --out compared
    """
    options = Options(
        optimizers,
        trials,
        most_trials,
        tuning_steps,
        seeds,
        metric,
        on,
        target,
        rates,
        threads,
        title,
    )
    if listing:
        values = asked(name, file, typed(given))
        length = {} if values.get("epochs") else {"steps": values.get("steps") or 1}
        typer.echo(listing_table(Settings(**values | length)))
        return
    if flags:
        typer.echo(flags_table("natgrad compare", ELSE))
        return
    with joined() as (comm, _):
        wanted, folder = raise_on_all_ranks(
            comm, lambda: comparison_setup(name, file, out, options, given, resume=resume)
        )
        tell = shown(lambda text: typer.echo(text, err=True))
        found = run(wanted, folder, tell, resume=resume)
    if not rank():
        typer.echo(said(found, folder))
    if found.signal:
        raise typer.Exit(128 + found.signal)
