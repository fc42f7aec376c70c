"""`natgrad reproduce`: tables and findings of the papers, measured again."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from natgrad.errors import SettingError
from natgrad.lab.reproduce import ITEMS, Item
from natgrad.lab.reproduce import reproduce as measure
from natgrad.lab.reproduce.runner import write_page
from natgrad.tables import Column, Table


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="What to measure; --list has all.", show_default=False),
    ] = None,
    listing: Annotated[bool, typer.Option("--list", help="Print what there is.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Measure everything.")] = False,
    seeds: Annotated[int, typer.Option(metavar="N", min=1, help="Of what is random.")] = 3,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="In seconds; the numbers mean nothing.")
    ] = False,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="For results and figures; it goes on there.")
    ] = Path("reproduced"),
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write into this page, between marks.")
    ] = None,
) -> None:
    """Measure tables and findings of the papers again.

    What is measured already is not measured twice: a command that was interrupted goes on.

    natgrad reproduce change-rates

    natgrad reproduce --all --out docs/reproduced --page docs/papers.md
    """
    if listing:
        rows = tuple((name, item.title, item.papers) for name, item in ITEMS.items())
        columns = (Column("name"), Column("what it is"), Column("papers"))
        typer.echo(Table("What can be measured again", columns, rows))
        return
    for name in _asked(names or [], everything):
        found = measure(ITEMS[name], out, seeds, _tell, smoke=smoke)
        typer.echo(found.table())
        typer.echo("\n".join(found.findings()) + "\n")
        if page is not None and not smoke:
            write_page(page, found, out)


def _tell(text: str) -> None:
    typer.echo(text, err=True)


def _possible(item: Item) -> bool:
    if not item.needs or find_spec(item.needs) is not None:
        return True
    _tell(f"{item.name} is left out, as {item.needs} is not installed: pip install {item.needs}.")
    return False


def _asked(names: list[str], everything: bool) -> list[str]:
    if everything:
        return [name for name, item in ITEMS.items() if _possible(item)]
    if not names:
        raise SettingError(
            f"natgrad reproduce is given no name: name some of {', '.join(ITEMS)}, or pass --all."
        )
    for name in names:
        if name not in ITEMS:
            raise SettingError(
                f"There is nothing called {name!r} to measure: name some of {', '.join(ITEMS)}."
            )
    return names
