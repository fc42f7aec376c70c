"""All commands under one name, a file each, which is imported when its command is asked for: help
that only names them need not wait for torch."""

from importlib import import_module
from textwrap import shorten
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from natgrad.cli.collector import no_search_for_cycles

# What `natgrad --help` says of each is the first sentence of its own help; a test compares them.
ABOUT = {
    "plan": "Print who does what, and compare the placements.",
    "bench": "Train on random data for a few steps, and show which messages ran under the "
    "backward pass.",
    "curvature": "Print sizes, traces, eigenvalues and measures of the curvature matrices of a "
    "model.",
    "train": "Train a network; Ctrl-C saves, and --resume goes on as if nothing had happened.",
    "compare": "Compare optimizers on one task; Ctrl-C saves, and --resume goes on.",
    "report": "Write one HTML page of runs and comparisons: curves, tables, K-FAC's time, "
    "drift, spectra.",
    "reproduce": "Measure tables and findings of the papers again.",
    "data": "Data sets: which there are, where they lie, and how to get them.",
}
_PLAIN: dict[str, Any] = {
    "add_completion": False,
    "rich_markup_mode": None,  # plain text: boxes leave half the room, and Markdown eats stars
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


class Commands(TyperGroup):
    """Names and first sentences from `ABOUT`, all else from the file of a command."""

    _loaded: dict[str, Any]

    @property  # type: ignore[override]
    def commands(self) -> dict[str, Any]:
        return {name: self._load(name) for name in ABOUT}

    @commands.setter
    def commands(self, none: Any) -> None:
        self._loaded = {}

    def list_commands(self, ctx: Any) -> list[str]:
        return list(ABOUT)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self._load(cmd_name) if cmd_name in ABOUT else None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        room = formatter.width - 6 - max(map(len, ABOUT))
        rows = [(name, shorten(text, room, placeholder="...")) for name, text in ABOUT.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def _load(self, name: str) -> Any:
        if name not in self._loaded:
            with no_search_for_cycles():
                found = getattr(import_module(f"natgrad.cli.{name}"), name)
            if not isinstance(found, typer.Typer):
                alone = typer.Typer(**_PLAIN)
                alone.command(name, no_args_is_help=True)(found)
                found = alone
            self._loaded[name] = get_command(found)
            self._loaded[name].name = name
        return self._loaded[name]


app = typer.Typer(
    cls=Commands,
    help="K-FAC for PyTorch: train and compare, plan a run on many ranks, see what its messages "
    "hide behind, and look at the curvature of a model.\n\n"
    "natgrad train --preset digits-cnn --out run",
    no_args_is_help=True,
    **_PLAIN,
)


@app.callback()
def _all() -> None:
    pass
