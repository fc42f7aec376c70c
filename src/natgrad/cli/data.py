"""`natgrad data`: which data sets there are, where they lie, and how to get them."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from natgrad.cli import terminal
from natgrad.errors import DataError
from natgrad.lab.data import locations
from natgrad.lab.data.get import get as bring
from natgrad.lab.data.get import named
from natgrad.lab.data.sources import ALL, Source
from natgrad.tables import Column, Table, bytes_text

data = typer.Typer(
    help="Data sets: which there are, where they lie, and how to get them.\n\nnatgrad data list",
    no_args_is_help=True,
)


@data.command("list")
def list_() -> None:
    """Print what data sets there are, and where each was found.

    They are looked for in the folder NATGRAD_DATA, in the cache (NATGRAD_CACHE, or natgrad in the
    user's cache folder), and where Debian installs data sets.

    natgrad data list
    """
    scikit = "in scikit-learn" if find_spec("sklearn") else "pip install 'natgrad[demo]'"
    rows = [("digits", "1,797 handwritten digits, 8 x 8", scikit)]
    rows += [(source.name, source.about, _where(source)) for source in ALL]
    columns = tuple(map(Column, ("name", "what", "where")))
    typer.echo(Table("Data sets", columns, tuple(rows)))


@data.command("get", no_args_is_help=True)
def get(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME", help=", ".join(source.name for source in ALL if source.remotes)
        ),
    ],
    mirror: Annotated[
        str | None,
        typer.Option("--from", metavar="URL", help="A folder with the same files, elsewhere."),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to", metavar="FOLDER", help="Instead of the cache; set NATGRAD_DATA to it."
        ),
    ] = None,
) -> None:
    """Download data sets, with checksums.

    What is there already is left alone, and what was interrupted is gone on with.

    natgrad data get mnist cifar10
    """
    for source in [named(name) for name in names]:
        try:
            with terminal.transfer(f"Getting {source.title}") as report:
                folder = bring(source, to, None if mirror is None else [mirror], report)
        except KeyboardInterrupt:
            raise DataError(
                "Stopped: what has arrived is kept, and the same command goes on from there."
            ) from None
        typer.echo(f"{source.title} is in {folder}.")


def _where(source: Source) -> str:
    try:
        found = locations.find(source)
    except DataError:
        if source.remotes:
            return f"natgrad data get {source.name} ({bytes_text(source.size)})"
        return "not found; bring your own"
    return str(next(iter(found.values())).parent)
