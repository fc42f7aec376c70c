"""The command line, `natgrad` or `python -m natgrad`; strings stand for objects here alone."""

import os
import sys
from collections.abc import Sequence

from natgrad.errors import CoverageError, NatgradError, SettingError


def run(arguments: Sequence[str] | None = None) -> None:
    """Run a command, by default that of the process; ends with its exit code: 2 for what was asked
    wrongly, 1 for what went wrong."""
    try:
        from natgrad.cli.main import app

        app(args=None if arguments is None else list(arguments), prog_name="natgrad")
    except ModuleNotFoundError as error:
        if (missing := (error.name or "").split(".")[0]) not in ("typer", "rich"):
            raise
        sys.exit(
            f"The command line of natgrad needs {missing}, which is not installed: pip install "
            "'natgrad[cli]'."
        )
    except NatgradError as error:
        if said := _said(error):
            print(said, file=sys.stderr)
        sys.exit(2 if isinstance(error, SettingError | CoverageError) else 1)


def rank() -> int:
    """The rank that torchrun gave this process, 0 also if it did not start it."""
    return int(os.environ.get("RANK", "0"))


def _said(error: NatgradError) -> str:
    """One line; nothing where the first rank says the same."""
    if not rank():
        return f"natgrad: {error}"
    return "" if error.everywhere else f"natgrad: rank {rank()}: {error}"
