"""Learning rates: a linear warm-up before any schedule, and schedules as schedulers take them."""

from collections.abc import Iterable
from dataclasses import dataclass

from natgrad.checks import (
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    check_numbers,
    check_whole,
    number,
)
from natgrad.errors import SettingError
from natgrad.schedules import Schedule, value_at


@dataclass(frozen=True)
class LinearWarmup:
    """``then(t) · (start + (1 - start) t / steps)`` during the first ``steps``, ``then(t)``
    afterwards (Pauloski 2022, sec. 6.3.1).

    Arguments:
        then: the schedule of the learning rate; its steps count from the beginning as well.
        steps: of the warm-up, at least 1.
        start: the part with which it begins, from 0 up to but not 1: 1 / N where the rate is that
            of one process times N.
    """

    then: Schedule
    steps: int
    start: float = 0.0

    def __post_init__(self) -> None:
        if not callable(self.then):
            raise SettingError(
                f"LinearWarmup.then is {self.then!r} but must be a function of the step: pass a "
                "schedule such as natgrad.schedules.StepDecay, or lambda step: 0.1."
            )
        check_whole(self.steps, "LinearWarmup.steps", low=1)
        check_numbers(self, start=FRACTION)

    def __call__(self, step: int) -> float:
        part = self.start + (1 - self.start) * min(1.0, step / self.steps)
        return part * self.then(step)


def relative(schedule: Schedule, to: float) -> Schedule:
    """``schedule(t) / to``, as `torch.optim.lr_scheduler.LambdaLR` takes it.

    Arguments:
        schedule: a function of the step.
        to: ``> 0``, the learning rate that the optimizer was made with.
    """
    if not callable(schedule):
        raise SettingError(
            f"schedule is {schedule!r} but must be a function of the step: pass one such as "
            "natgrad.schedules.PolynomialDecay."
        )
    rate = number(to, "to", POSITIVE, remedy="pass the learning rate of the optimizer")

    def factor(step: int) -> float:
        return value_at(schedule, step, "schedule", NOT_NEGATIVE) / rate

    return factor


def steps_of(epochs: Iterable[float], steps_per_epoch: float) -> tuple[int, ...]:
    """Epochs as steps, rounded, for `natgrad.schedules.StepDecay`.

    Arguments:
        epochs: ``≥ 0``, need not be whole.
        steps_per_epoch: ``> 0``, number of steps in an epoch; need not be whole.
    """
    number(steps_per_epoch, "steps_per_epoch", POSITIVE)
    return tuple(
        round(number(epoch, "An epoch", NOT_NEGATIVE) * steps_per_epoch) for epoch in epochs
    )
