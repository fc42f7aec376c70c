"""A bar for long passes over the data: only in a terminal, and only after a second."""

import sys
from collections.abc import Iterable, Iterator, Sized
from time import monotonic
from typing import Any, TypeVar

T = TypeVar("T")
_PATIENCE = 1.0  # seconds before a bar appears


def track(items: Iterable[T], label: str, wanted: bool | None) -> Iterator[T]:
    """The items, with a progress bar on standard error.

    Arguments:
        items: what is iterated over.
        label: what the bar says.
        wanted: ``True`` shows a bar, ``None`` only if standard error is a terminal, ``False``
            never; without ``rich`` there is none. It appears after a second.
    """
    total = (len(items) if isinstance(items, Sized) else 0) or None  # 0: nobody knows
    bar = _bar(wanted) if total is None or total > 1 else None
    if bar is None:
        yield from items
        return
    start, task = monotonic(), None
    try:
        for done, item in enumerate(items):
            yield item
            if task is None and monotonic() - start >= _PATIENCE:
                bar.start()
                task = bar.add_task(label, total=total)
            if task is not None:
                bar.update(task, completed=done + 1)
    finally:
        if task is not None:
            bar.stop()


def _bar(wanted: bool | None) -> Any:
    if wanted is False or (wanted is None and not sys.stderr.isatty()):
        return None
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        return None
    return Progress(console=Console(stderr=True), transient=True)
