"""Commands are called in this process, as from a shell."""

from dataclasses import dataclass

import pytest
from typer.main import get_command

from distributed.conftest import world
from natgrad.cli import run
from natgrad.cli.main import app

__all__ = ["world"]

# The files of all commands: some tests forget what is imported while they run.
get_command(app).commands  # noqa: B018


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def words(self) -> str:
        """Without the line breaks and frames of a terminal's width."""
        return " ".join(self.err.replace("│", " ").split())


@pytest.fixture
def natgrad(capsys, monkeypatch):
    """``natgrad("plan", "--help")`` gives exit code and output."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*arguments: str) -> Said:
        with pytest.raises(SystemExit) as end:
            run(arguments)
        code = end.value.code
        captured = capsys.readouterr()
        if isinstance(code, str):  # which Python would print
            return Said(1, captured.out, captured.err + code)
        return Said(code or 0, captured.out, captured.err)

    return call
