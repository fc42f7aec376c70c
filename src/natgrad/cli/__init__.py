"""The command line, `natgrad` or `python -m natgrad`; strings stand for objects here alone."""

import sys
from collections.abc import Sequence

from natgrad.errors import NatgradError


def run(arguments: Sequence[str] | None = None) -> None:
    """Run a command, by default that of the process; ends with its exit code."""
    try:
        from natgrad.cli.main import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(
            f"The command line of natgrad needs {error.name}, which is not installed: pip install "
            "'natgrad[cli]'."
        )
    try:
        app(args=None if arguments is None else list(arguments), prog_name="natgrad")
    except NatgradError as error:
        sys.exit(f"natgrad: {error}")
