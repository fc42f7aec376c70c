"""All commands under one name, a file each."""

import typer

from natgrad.cli.bench import bench
from natgrad.cli.curvature import curvature
from natgrad.cli.data import data
from natgrad.cli.plan import plan
from natgrad.cli.train import train

app = typer.Typer(
    help="K-FAC for PyTorch: plan a run on many ranks, see what its messages hide behind, and look "
    "at the curvature of a model.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(no_args_is_help=True)(plan)
app.command(no_args_is_help=True)(bench)
app.command(no_args_is_help=True)(curvature)
app.command(no_args_is_help=True)(train)
app.add_typer(data, name="data")
