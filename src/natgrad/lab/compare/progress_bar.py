"""How a comparison goes: a line a run, or a bar in a terminal, with the time that is left."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from importlib import import_module
from statistics import mean
from typing import Any, Protocol

from natgrad.lab.train.progress_line import Values, bar_or_lines
from natgrad.tables import seconds_text


class ComparisonProgress(Protocol):
    """What a comparison tells while it runs."""

    def run(self, number: int, total: int, text: str) -> None:
        """The ``number``-th of ``total`` runs begins."""
        ...

    def part(self, done: float) -> None:
        """Of the run that is under way, from 0 to 1."""
        ...

    def note(self, text: str) -> None: ...

    def end(self) -> None: ...


@dataclass
class ComparisonLines:
    say: Callable[[str], None]

    def run(self, number: int, total: int, text: str) -> None:
        self.say(f"[{number:{len(str(total))}}/{total}] {text}")

    def part(self, done: float) -> None: ...

    def note(self, text: str) -> None:
        self.say(text)

    def end(self) -> None: ...


class ComparisonBar:
    """By rich."""

    def __init__(self) -> None:
        rich = import_module("rich.progress")
        console = import_module("rich.console").Console(stderr=True)
        # No markup: names of contenders may have brackets.
        columns = (rich.BarColumn(20), rich.TextColumn("{task.description}", markup=False))
        self._progress: Any = rich.Progress(*columns, console=console, transient=True)
        self._task: Any = self._progress.add_task("", total=1)
        self._before = 0

    def run(self, number: int, total: int, text: str) -> None:
        self._progress.start()
        self._before = number - 1
        text = f"[{number}/{total}] {text}"
        self._progress.update(self._task, total=total, completed=number - 1, description=text)

    def part(self, done: float) -> None:
        self._progress.update(self._task, completed=self._before + done)

    def note(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, markup=False)

    def end(self) -> None:
        self._progress.stop()


class NoComparisonProgress:
    def run(self, number: int, total: int, text: str) -> None: ...

    def part(self, done: float) -> None: ...

    def note(self, text: str) -> None: ...

    def end(self) -> None: ...


def shown(say: Callable[[str], None]) -> ComparisonProgress:
    bar: Callable[[], ComparisonProgress] = ComparisonBar
    return bar_or_lines(bar, lambda: ComparisonLines(say))


@dataclass
class RunWithinComparison:
    """Tells of one run's steps."""

    progress: ComparisonProgress
    steps: int = 1

    def start(self, step: int, steps: int) -> None:
        self.steps = steps
        self.progress.part(step / steps)

    def step(self, step: int, values: Values) -> None:
        self.progress.part(step / self.steps)

    def tested(self, step: int, values: Values) -> None: ...

    def end(self) -> None: ...


@dataclass
class TimeLeft:
    """Of the time that is left, from how long runs of each contender took."""

    took: dict[str, list[float]] = field(default_factory=dict)

    def add(self, key: str, seconds: float) -> None:
        self.took.setdefault(key, []).append(seconds)

    def left(self, runs: Iterable[tuple[str, float]]) -> str:
        """For runs by their key and the share of a whole run that each is; nothing as long as
        nothing is known."""
        if not self.took:
            return ""
        each = {key: mean(seconds) for key, seconds in self.took.items()}
        usual = mean(each.values())
        return (
            f", about {seconds_text(sum(share * each.get(key, usual) for key, share in runs))} left"
        )
