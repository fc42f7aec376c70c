"""One line that says how a run goes: rewritten in a terminal, now and then a new one elsewhere."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from math import ceil
from typing import Any, Protocol, TypeVar

from natgrad.tables import seconds_text

Values = Mapping[str, float]
T = TypeVar("T")


class Progress(Protocol):
    """What the loop tells while it runs."""

    def start(self, step: int, steps: int) -> None: ...

    def step(self, step: int, values: Values) -> None:
        """After each step, with what is known: ``loss`` and test metrics, ``seconds`` of a step,
        and K-FAC's ``share`` of them."""
        ...

    def tested(self, step: int, values: Values) -> None: ...

    def end(self) -> None: ...


def line(values: Values) -> str:
    """'loss 0.1234, accuracy 97.5%, 12 ms a step, K-FAC 18%'"""
    parts = []
    for name, value in values.items():
        match name:
            case "seconds":
                parts.append(f"{seconds_text(value)} a step")
            case "share":
                parts.append(f"K-FAC {value:.0%}")
            case "accuracy" | "dice":
                parts.append(f"{name} {value:.1%}")
            case "lr":
                pass
            case _:
                parts.append(f"{name} {value:.4g}")
    return ", ".join(parts)


@dataclass
class RunLines:
    """Lines, about ``most`` of them besides those of tests."""

    say: Callable[[str], None]
    most: int = 20
    steps: int = 0
    every: int = field(default=1, init=False)
    told: int = field(
        default=0, init=False
    )  # intervals of ``every`` steps that have had their line

    def start(self, step: int, steps: int) -> None:
        self.steps, self.every = steps, max(1, ceil(steps / self.most))
        self.told = step // self.every

    def step(self, step: int, values: Values) -> None:
        # Which steps are told here, the interval of the log decides.
        if step // self.every > self.told:
            self.told = step // self.every
            self.say(f"step {step} of {self.steps}: {line(values)}")

    def tested(self, step: int, values: Values) -> None:
        self.say(f"step {step} of {self.steps}: test {line(values)}")

    def end(self) -> None: ...


class RunBar:
    """A bar in a terminal, by rich."""

    def __init__(self) -> None:
        rich = import_module("rich.progress")
        console = import_module("rich.console").Console(stderr=True)
        columns = (
            rich.BarColumn(20),
            rich.MofNCompleteColumn(),
            rich.TextColumn("{task.description}"),
            rich.TimeRemainingColumn(),
        )
        self._progress: Any = rich.Progress(*columns, console=console)
        self._task: Any = None

    def start(self, step: int, steps: int) -> None:
        self._progress.start()
        self._task = self._progress.add_task("", total=steps, completed=step)

    def step(self, step: int, values: Values) -> None:
        self._progress.update(self._task, completed=step, description=line(values))

    def tested(self, step: int, values: Values) -> None:
        self._progress.console.print(f"step {step}: test {line(values)}", highlight=False)

    def end(self) -> None:
        self._progress.stop()


class NoRunProgress:
    """For all ranks but the first."""

    def start(self, step: int, steps: int) -> None: ...

    def step(self, step: int, values: Values) -> None: ...

    def tested(self, step: int, values: Values) -> None: ...

    def end(self) -> None: ...


def bar_or_lines(bar: Callable[[], T], lines: Callable[[], T]) -> T:
    """A bar if standard error is a terminal and rich is there, lines otherwise."""
    if sys.stderr.isatty():
        try:
            return bar()
        except ImportError:
            pass
    return lines()


def shown(say: Callable[[str], None]) -> Progress:
    bar: Callable[[], Progress] = RunBar
    return bar_or_lines(bar, lambda: RunLines(say))
