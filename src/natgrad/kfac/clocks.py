"""The clocks of a step: on which steps factors are updated and decompositions refreshed.

Statistics cost a backward pass with hooks, decompositions a cube of the layer's width, and
preconditioning two products. So the first is done rarely, the second more rarely, and the third at
every step. A and G have a clock each (Osawa 2019, sec. 5.4).

A clock is a pure function of the step and of the last step that was marked, so that all ranks agree
without communication, and a checkpoint needs one number. Only `Drift` looks at measured errors.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from natgrad.capture.blocks import Block
from natgrad.checks import AT_LEAST_ONE, POSITIVE, check_whole
from natgrad.errors import SettingError
from natgrad.schedules import Drift, Schedule, Staggered, value_at

Interval = int | Schedule | Drift | Staggered
Intervals = Interval | Mapping[str, Interval]


class Clock:
    """Says on which steps something is due; the first step always is.

    A constant interval ``n`` is due when ``t % n == 0``; a function when ``t - last`` is at least
    ``interval(t)``, rounded to whole steps, with ``last`` the step passed to ``mark``; `Drift` when
    the measured error is above its tolerance.
    """

    def __init__(
        self, interval: int | Schedule | Drift | Staggered, name: str = "interval"
    ) -> None:
        if callable(interval):
            value_at(interval, 0, name, AT_LEAST_ONE)
        elif not isinstance(interval, Drift | Staggered):
            check_whole(interval, name, low=1)
        self.interval = interval
        self.name = name
        self.last = -1  # never

    def due(self, step: int, error: float | None = None) -> bool:
        """``error`` is the measured error of the decomposition, which only `Drift` asks for.

        A step that was due stays due after it is marked, so all who ask within a step agree.
        """
        if isinstance(self.interval, int):
            return step % self.interval == 0
        # A mark in the future is from a run whose steps were counted anew.
        if self.last < 0 or step <= self.last:
            return True
        if isinstance(self.interval, Staggered):
            return False  # but one layer or the other has its turn
        if isinstance(self.interval, Drift):
            late = self.interval.at_most is not None and step - self.last >= self.interval.at_most
            # Written so that an error of NaN is due.
            return late or (error is not None and not error <= self.interval.tolerance)
        return step - self.last >= round(value_at(self.interval, step, self.name, AT_LEAST_ONE))

    def mark(self, step: int) -> None:
        self.last = step

    def state_dict(self) -> dict[str, int]:
        return {"last": self.last}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.last = int(state["last"])


class Clocks:
    """One clock for the factors ``"A"``, and one for the factors ``"G"`` (Osawa 2019, sec. 5.4)."""

    def __init__(self, intervals: Intervals, name: str, *, drift: bool) -> None:
        if isinstance(intervals, Mapping):
            if set(intervals) != {"A", "G"}:
                raise SettingError(
                    f"{name} is a mapping with the keys {sorted(map(str, intervals))} but must "
                    "have exactly 'A' and 'G': give an interval for each."
                )
            by_key = dict(intervals)
        else:
            by_key = {"A": intervals, "G": intervals}
        if not drift and any(isinstance(i, Drift) for i in by_key.values()):
            raise SettingError(
                f"{name} is a Drift but must be an int or a function of the step: drift can only "
                "be measured on updated factors, so pass Drift as refresh_every."
            )
        if not drift and any(isinstance(i, Staggered) for i in by_key.values()):
            raise SettingError(
                f"{name} is Staggered but must be an int or a function of the step: one backward "
                "pass updates all layers, so pass Staggered as refresh_every."
            )
        self.name = name
        self.clocks = {key: Clock(interval, name) for key, interval in by_key.items()}

        self.takes_turns = any(isinstance(i, Staggered) for i in by_key.values())
        self.drifts = any(isinstance(i, Drift) for i in by_key.values())

    @staticmethod
    def key(factor: str) -> str:
        return "A" if factor in ("A", "At") else "G"

    def due(self, step: int) -> set[str]:
        """The keys that are due by time alone."""
        return {key for key, clock in self.clocks.items() if clock.due(step)}

    def factors(self, blocks: Iterable[Block], keys: set[str]) -> dict[Block, list[str]]:
        """Of each block the factors of these keys, of those that have any."""
        due = {b: [name for name in b.factors if self.key(name) in keys] for b in blocks}
        return {block: names for block, names in due.items() if names}

    def typical(self) -> int:
        """The interval in steps, late in a run: for the costs of a plan only."""
        return min(_usual(clock.interval) for clock in self.clocks.values())

    def mark(self, step: int, keys: set[str]) -> None:
        for key in keys:
            self.clocks[key].mark(step)

    def turn(self, factor: str, step: int, index: int, count: int) -> bool:
        """Whether it is the turn of a factor of block ``index`` of ``count``."""
        interval = self.clocks[self.key(factor)].interval
        return isinstance(interval, Staggered) and interval.turn(step, index, count)

    def tolerance(self, factor: str) -> float | None:
        interval = self.clocks[self.key(factor)].interval
        return interval.tolerance if isinstance(interval, Drift) else None

    def state_dict(self) -> dict[str, Any]:
        return {key: clock.state_dict() for key, clock in self.clocks.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for key, clock in self.clocks.items():
            clock.load_state_dict(state[key])


def _usual(interval: Interval) -> int:
    if isinstance(interval, int):
        return interval
    if isinstance(interval, Staggered):
        return interval.every
    if isinstance(interval, Drift):
        return interval.at_most or 100
    return max(1, round(value_at(interval, 10**6, "interval", POSITIVE)))
