"""Hyperparameters as functions of the step, ``value = f(t)``: damping, learning rate, momentum.

Epochs are counted as fractions, ``e = t / steps_per_epoch``, so every schedule is a pure function
of the step: resuming from a checkpoint needs the step alone.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.optim import Optimizer

from natgrad.checks import (
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    Range,
    check_numbers,
    check_whole,
    number,
)
from natgrad.errors import SettingError

Schedule = Callable[[int], float]


def value_at(value: float | Schedule, step: int, name: str, allowed: Range) -> float:
    """The value of a setting at a step.

    Arguments:
        value: a number, or a function of the step.
        step: counted from 0.
        name: what error sentences call the setting.
        allowed: the range that the value must lie in; outside of it `SettingError`.
    """
    if callable(value):
        remedy = f"correct the function passed as {name}"
        return number(value(step), name, allowed, when=f" at step {step}", remedy=remedy)
    remedy = "pass such a number, or a function of the step that returns one"
    return number(value, name, allowed, remedy=remedy)


@dataclass(frozen=True)
class WarmupDamping:
    """Damping that falls from ``start`` towards ``target`` (Osawa 2019, eq. 13 and 14).

    ``γ ← (1-α) γ + α target`` with ``α = 2 log10(start / target) / warm_steps``, in closed form
    ``γ(t) = target + (start - target) (1-α)^t``. The rule has no end: it leaves about 2.4 to 2.8
    times the target at ``warm_steps`` when started at 100 times the target, and goes on falling.

    Arguments:
        start: ``γ(0) > 0``, at least ``target``.
        target: ``> 0``, what the damping approaches.
        warm_steps: steps that set how fast it falls; so few that ``α`` would exceed 1 raise.
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
    """Learning rate that falls from ``start`` to 0 between two epochs (Osawa 2019, eq. 15).

    ``η(e) = start (1 - (e - begin) / (end - begin))^power``, constant before and after.

    Arguments:
        start: ``> 0``, the rate up to the epoch ``begin``.
        begin: ``≥ 0``, epoch at which the decay starts; need not be whole.
        end: epoch at which it reaches 0, above ``begin``.
        power: ``> 0``; 1 is linear, a larger one falls faster at first.
        steps_per_epoch: ``> 0``, number of steps in an epoch; need not be whole.
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
        """The rate relative to ``start``, as `torch.optim.lr_scheduler.LambdaLR` takes it.

        Arguments:
            step: counted from 0.
        """
        left = (self.end - step / self.steps_per_epoch) / (self.end - self.begin)
        return float(min(1.0, max(0.0, left)) ** self.power)


@dataclass(frozen=True)
class CoupledMomentum:
    """Momentum in a fixed ratio to the learning rate, ``m = (start / lr(0)) lr(t)``.

    Osawa 2019, eq. 16.

    Arguments:
        start: momentum at step 0, from 0 up to but not 1.
        lr: the learning rate as a function of the step, positive at step 0.
    """

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
        """Set the momentum of each parameter group from its learning rate; call it after
        ``scheduler.step()``.

        Arguments:
            optimizer: whose groups are changed, by their current ``lr``; a momentum outside of [0,
                1) raises.
            key: under which a group has its momentum; a group without it raises.
        """
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
class StepDecay:
    """A value that is multiplied by a factor at fixed steps (Pauloski 2022, sec. 5.3).

    A factor below 1 lowers a damping; a factor above 1 makes an interval longer.

    Arguments:
        value: ``> 0``, at the start.
        factor: ``> 0``, by which it is multiplied at each of the steps.
        at: the steps, counted from 0 and strictly increasing; the new value holds from that step
            on.
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
