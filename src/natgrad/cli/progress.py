"""What a terminal shows while a command is at work: on standard error, only if that is a terminal,
and gone when the command is done."""

import sys
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from rich import progress
from rich.console import Console

T = TypeVar("T")


def track(items: Sequence[T], what: str) -> Iterable[T]:
    """``items``, with a bar that says how many of them are done."""
    if not sys.stderr.isatty():
        return items
    return progress.track(items, what, console=Console(stderr=True), transient=True)


def status(what: str) -> AbstractContextManager[object]:
    """For what does not say how much of it is done."""
    return Console(stderr=True).status(what) if sys.stderr.isatty() else nullcontext()
