"""Hyperparameters as functions of the step, ``value = f(t)``, and the clocks that intervals drive.

Epochs are counted as fractions, ``e = t / steps_per_epoch``, so every schedule is a pure function
of the step: resuming needs the step alone.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch.optim import Optimizer

from natgrad.errors import SettingError
from natgrad.runtime.ranges import (
    AT_LEAST_ONE,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    Range,
    check_numbers,
    check_whole,
    number,
)

Schedule = Callable[[int], float]


def value_at(value: float | Schedule, step: int, name: str, allowed: Range) -> float:
    """The number, or what the function returns at ``step``; outside ``allowed`` it raises."""
    if callable(value):
        remedy = f"correct the function passed as {name}"
        return number(value(step), name, allowed, when=f" at step {step}", remedy=remedy)
    remedy = "pass such a number, or a function of the step that returns one"
    return number(value, name, allowed, remedy=remedy)


@dataclass(frozen=True)
class Drift:
    """Refresh a factor when its decomposition is measured to be off by more than ``tolerance``.

    The error is relative; ``at_most`` is the longest interval in steps, whatever is measured.
    """

    tolerance: float
    at_most: int | None = None

    def __post_init__(self) -> None:
        check_numbers(self, tolerance=POSITIVE)
        if self.at_most is not None:
            check_whole(self.at_most, "Drift.at_most", low=1)


@dataclass(frozen=True)
class Staggered:
    """Refresh every factor once in ``every`` steps, the layers one after the other: no step has to
    wait for all decompositions at once. The first refresh is of all."""

    every: int

    def __post_init__(self) -> None:
        check_whole(self.every, "Staggered.every", low=1)

    def turn(self, step: int, index: int, count: int) -> bool:
        """Whether it is the turn of layer ``index`` of ``count``."""
        return step % self.every == index * self.every // count


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


@dataclass(frozen=True)
class WarmupDamping:
    """Damping that falls from ``start`` towards ``target`` (O16).

    ``γ ← (1-α) γ + α target`` with ``α = 2 log10(start / target) / warm_steps``, in closed form
    ``γ(t) = target + (start - target) (1-α)^t``. The rule has no end: it leaves about 2.4 to 2.8
    times the target at ``warm_steps`` when started at 100 times the target, and goes on falling.
    """

    start: float
    target: float
    warm_steps: int

    def __post_init__(self) -> None:
        check_numbers(self, start=POSITIVE, target=POSITIVE)
        check_whole(self.warm_steps, "WarmupDamping.warm_steps", low=1)
        if self.start < self.target:
            raise SettingError(
                f"WarmupDamping.start is {self.start!r} but must be at least the target "
                f"{self.target!r}: damping falls during warm-up, so swap the two."
            )
        if self._alpha > 1:
            least = math.ceil(self._alpha * self.warm_steps)
            raise SettingError(
                f"WarmupDamping.warm_steps is {self.warm_steps} but must be at least {least} to go "
                f"from {self.start!r} to {self.target!r} without overshooting: pass more steps."
            )

    @property
    def _alpha(self) -> float:
        return 2 * math.log10(self.start / self.target) / self.warm_steps

    def __call__(self, step: int) -> float:
        return float(self.target + (self.start - self.target) * (1 - self._alpha) ** step)


@dataclass(frozen=True)
class PolynomialDecay:
    """Learning rate that falls from ``start`` to 0 between the epochs ``begin`` and ``end`` (O18).

    ``η(e) = start (1 - (e - begin) / (end - begin))^power``, held at its ends outside of them.
    """

    start: float
    begin: float
    end: float
    power: float
    steps_per_epoch: float

    def __post_init__(self) -> None:
        check_numbers(self, start=POSITIVE, begin=NOT_NEGATIVE, end=POSITIVE)
        check_numbers(self, power=POSITIVE, steps_per_epoch=POSITIVE)
        if self.end <= self.begin:
            raise SettingError(
                f"PolynomialDecay.end is {self.end!r} but must be above begin, {self.begin!r}: "
                "pass the epoch at which the rate reaches 0."
            )

    def __call__(self, step: int) -> float:
        return self.start * self.factor(step)

    def factor(self, step: int) -> float:
        """The rate relative to ``start``, as `torch.optim.lr_scheduler.LambdaLR` takes it."""
        left = (self.end - step / self.steps_per_epoch) / (self.end - self.begin)
        return float(min(1.0, max(0.0, left)) ** self.power)


@dataclass(frozen=True)
class CoupledMomentum:
    """Momentum in a fixed ratio to the learning rate, ``m = (start / lr(0)) lr(t)`` (O19)."""

    start: float
    lr: Schedule

    def __post_init__(self) -> None:
        check_numbers(self, start=FRACTION)
        if not callable(self.lr):
            raise SettingError(
                f"CoupledMomentum.lr is {self.lr!r} but must be a function of the step: "
                "pass the schedule of the learning rate, such as PolynomialDecay."
            )
        value_at(self.lr, 0, "CoupledMomentum.lr", POSITIVE)

    def __call__(self, step: int) -> float:
        return self._at(self.lr(step))

    def couple(self, optimizer: Optimizer, key: str = "momentum") -> None:
        """Sets each group's momentum, which is under ``key``, from its learning rate; call it after
        ``scheduler.step()``."""
        for index, group in enumerate(optimizer.param_groups):
            if key not in group:
                raise SettingError(
                    f"CoupledMomentum needs parameter groups with a '{key}', which group "
                    f"{index} of {type(optimizer).__name__} does not have: use torch.optim.SGD."
                )
            momentum = self._at(float(group["lr"]))
            if momentum not in FRACTION:
                raise SettingError(
                    f"The momentum of parameter group {index} is {momentum:g} for its lr "
                    f"{float(group['lr']):g} but must be {FRACTION}: give the group a learning "
                    f"rate in step with CoupledMomentum.lr, which starts at {self.lr(0):g}."
                )
            group[key] = momentum

    def _at(self, rate: float) -> float:
        return self.start / self.lr(0) * rate


@dataclass(frozen=True)
class GrowingInterval:
    """1 during the first ``after`` steps, then ``min(at_most, every ⌊e / every⌋ + 1)`` (O29)."""

    steps_per_epoch: float
    every: int = 5
    at_most: int = 20
    after: int = 500

    def __post_init__(self) -> None:
        check_numbers(self, steps_per_epoch=POSITIVE)
        for field, low in (("every", 1), ("at_most", 1), ("after", 0)):
            check_whole(getattr(self, field), f"GrowingInterval.{field}", low)

    def __call__(self, step: int) -> int:
        if step < self.after:
            return 1
        return min(self.at_most, self.every * int(step // (self.every * self.steps_per_epoch)) + 1)


@dataclass(frozen=True)
class Doubling:
    """Steps 0, 1, 2, 4, 8, 16, …, and every ``at_most`` steps once that is reached.

    Curvature changes fastest at the start, where a factor has seen least data: a constant interval
    would work for long with what one batch at the initial weights has shown.
    """

    at_most: int

    def __post_init__(self) -> None:
        check_whole(self.at_most, "Doubling.at_most", low=1)

    def __call__(self, step: int) -> int:
        return min(self.at_most, max(1, -(-step // 2)))


@dataclass(frozen=True)
class TwoPhaseInterval:
    """``first`` while ``e < epoch``, ``then`` afterwards (O30)."""

    steps_per_epoch: float
    first: int = 1
    then: int = 20
    epoch: float = 13

    def __post_init__(self) -> None:
        check_numbers(self, steps_per_epoch=POSITIVE, epoch=NOT_NEGATIVE)
        for field in ("first", "then"):
            check_whole(getattr(self, field), f"TwoPhaseInterval.{field}", low=1)

    def __call__(self, step: int) -> int:
        return self.first if step < self.epoch * self.steps_per_epoch else self.then


@dataclass(frozen=True)
class StepDecay:
    """``value · factor^k`` once ``k`` of the steps ``at`` are reached (P16).

    A factor below 1 lowers a damping; a factor above 1 makes an interval longer.
    """

    value: float
    factor: float
    at: Sequence[int]

    def __post_init__(self) -> None:
        check_numbers(self, value=POSITIVE, factor=POSITIVE)
        if not isinstance(self.at, Sequence):
            raise SettingError(
                f"StepDecay.at is {self.at!r} but must be a sequence of steps: pass a tuple."
            )
        object.__setattr__(self, "at", tuple(self.at))  # a list would not be hashable
        for step in self.at:
            check_whole(step, "A step of StepDecay.at", low=0)
        if sorted(set(self.at)) != list(self.at):
            raise SettingError(
                f"StepDecay.at is {self.at!r} but must be increasing: sort the steps, each once."
            )

    def __call__(self, step: int) -> float:
        return self.value * self.factor ** bisect_right(self.at, step)


@dataclass(frozen=True)
class BatchInterval:
    """Interval inversely proportional to the global batch: as many refreshes an epoch (P22).

    ``interval · reference / batch``, by default 500 at 2,048 samples (64 processes of 32), which is
    2000, 1000, 500, 250, 125 for 16, 32, 64, 128, 256 of them.
    """

    batch: int
    interval: int = 500
    reference: int = 2048

    def __post_init__(self) -> None:
        for field in ("batch", "interval", "reference"):
            check_whole(getattr(self, field), f"BatchInterval.{field}", low=1)

    def __call__(self, step: int) -> int:
        return max(1, round(self.interval * self.reference / self.batch))
