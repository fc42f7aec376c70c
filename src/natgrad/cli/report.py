"""`natgrad report`: one page of runs and comparisons, to look at in any browser."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from natgrad.cli import terminal
from natgrad.lab.report import page


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER", help="Of runs or comparisons.", show_default=False),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="The page; FOLDER/report.html by default."),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option("--png", metavar="FOLDER", help="Write the pictures as PNGs as well."),
    ] = None,
    title: Annotated[
        str | None, typer.Option("--title", metavar="TEXT", help="Above the page.")
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Show the page in a browser.")] = False,
) -> None:
    """Write one HTML page of runs and comparisons: curves, tables, K-FAC's time, drift, spectra.

    natgrad report run --png pictures

    natgrad report first second --out both.html --open
    """
    with terminal.status("Drawing"):
        written = page.write(folders, out, png, title)
    typer.echo(f"The page is {written}.")
    if png is not None:
        typer.echo(f"The pictures are in {png}.")
    if show and not webbrowser.open(written.absolute().as_uri()):
        typer.echo("There is no browser to show it in: open the file in one.", err=True)
