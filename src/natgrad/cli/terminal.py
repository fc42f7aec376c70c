"""What a terminal shows while a command is at work: on standard error, only if that is a terminal,
and gone when the command is done."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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


@contextmanager
def transfer(what: str) -> Iterator[Callable[[str, int, int], None] | None]:
    """A function to be told of files: their name, the bytes that are here, and those in all."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, progress.TaskID] = {}

        def report(name: str, here: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(f"{what}: {name}", total=total)
            bar.update(tasks[name], completed=here)

        yield report
