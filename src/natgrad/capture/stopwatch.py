"""Seconds by stage, measured on the host.

The clock is read without waiting for an accelerator, which would cost more than it shows: there, a
stage's time is that of launching its work.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter


class Stopwatch:
    """``with watch("refresh"): ...`` adds to that stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += perf_counter() - start
            self.calls[stage] += 1
