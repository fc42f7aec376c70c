"""All commands under one name, a file each."""

import typer

from natgrad.cli.bench import bench
from natgrad.cli.compare import compare
from natgrad.cli.curvature import curvature
from natgrad.cli.data import data
from natgrad.cli.plan import plan
from natgrad.cli.report import report
from natgrad.cli.train import train

app = typer.Typer(
    help="K-FAC for PyTorch: train and compare, plan a run on many ranks, see what its messages "
    "hide behind, and look at the curvature of a model.\n\n"
    "natgrad train --preset digits-cnn --out run",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # plain text: boxes leave half the room, and Markdown eats stars
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(no_args_is_help=True)(plan)
app.command(no_args_is_help=True)(bench)
app.command(no_args_is_help=True)(curvature)
app.command(no_args_is_help=True)(train)
app.command(no_args_is_help=True)(compare)
app.command(no_args_is_help=True)(report)
app.add_typer(data, name="data")
