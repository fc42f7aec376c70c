"""Settings that are more than a number, by the words that stand for them: intervals, dampings,
precisions and second passes. `natgrad.lab.names` registers them.

What is counted in epochs is turned into steps here, so that a word means the same in every run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from natgrad.comm.wire import WireFormat, float21
from natgrad.damping import Relative
from natgrad.errors import SettingError
from natgrad.kfac.clocks import Interval, Intervals
from natgrad.lab import registry
from natgrad.lab.schemes.gradient_norm import GradientNorm
from natgrad.lab.schemes.rates import steps_of
from natgrad.lab.schemes.sam import SAM, AdaptiveSAM
from natgrad.lab.schemes.second_pass import SecondPass
from natgrad.schedules import (
    BatchInterval,
    Doubling,
    Drift,
    GrowingInterval,
    LevenbergMarquardt,
    Schedule,
    Staggered,
    StepDecay,
    TwoPhaseInterval,
    WarmupDamping,
)


@dataclass(frozen=True)
class RunRequest:
    """What settings of a run are made from: steps of an epoch, samples of a step, and whether
    numbers of steps are reached by doubling (``ramp``)."""

    steps_per_epoch: float = 1.0
    batch_size: int = 1
    ramp: bool = False


def interval_of(asked: RunRequest, steps: int) -> Interval:
    """That of a bare number."""
    return Doubling(steps) if asked.ramp else steps


def _each(asked: RunRequest, A: int | Interval, G: int | Interval) -> Intervals:
    """A clock for each of the two factors (Osawa 2019, sec. 5.4)."""
    given = {"A": A, "G": G}
    return {
        name: interval_of(asked, one) if isinstance(one, int) else one
        for name, one in given.items()
    }


def _growing(asked: RunRequest, every: int = 5, at_most: int = 20, after: int = 500) -> Interval:
    return GrowingInterval(asked.steps_per_epoch, every, at_most, after)


def _two_phase(asked: RunRequest, first: int = 1, then: int = 20, epoch: float = 13) -> Interval:
    return TwoPhaseInterval(asked.steps_per_epoch, first, then, epoch)


def _batch(asked: RunRequest, interval: int = 500, reference: int = 2048) -> Interval:
    return BatchInterval(asked.batch_size, interval, reference)


def _step_decay(
    asked: RunRequest, value: float, factor: float, at: float | Sequence[float]
) -> Schedule:
    """``at`` in epochs (Pauloski 2022, sec. 6.4.1)."""
    epochs = at if isinstance(at, Sequence) else (at,)
    return StepDecay(value, factor, tuple(steps_of(epochs, asked.steps_per_epoch)))


def own_schedule(kind: str, returns: str) -> Callable[[str, Any], Callable[..., Any]]:
    """A function of the step; with arguments, or a class, what makes one."""

    def adapt(path: str, found: Any) -> Callable[..., Any]:
        what = kind.capitalize()
        function = registry.function(path, what, returns, found)

        def made(*_: Any, **named: Any) -> Any:
            if not named and not isinstance(function, type):
                return function
            try:
                return function(**named)
            except TypeError as error:
                raise SettingError(
                    f"{what} {path!r} could not be built ({error}): name a function of the step, "
                    "or write the arguments that it needs to become one."
                ) from error

        return made

    return adapt


def own_second_pass(path: str, found: Any) -> Callable[..., SecondPass]:
    """A class, or a function of the parameters, with what is written behind it."""
    made_by = registry.function(path, "Second pass", "a SecondPass", found)

    def made(parameters: Sequence[nn.Parameter], **named: Any) -> SecondPass:
        kind: Any = SecondPass
        build, takes = partial(made_by, **named), "takes parameters"
        found: SecondPass = registry.call(build, path, "Second pass", kind, parameters, takes=takes)
        return found

    return made


INTERVALS: dict[str, Callable[..., Intervals]] = {
    "each": _each,
    "every": lambda asked, steps: steps,
    "doubling": lambda asked, at_most: Doubling(at_most),
    "growing": _growing,
    "two-phase": _two_phase,
    "batch": _batch,
    "step-decay": _step_decay,
    "drift": lambda asked, tolerance, at_most=None: Drift(tolerance, at_most),
    "staggered": lambda asked, every: Staggered(every),
}


def _warm_up(asked: RunRequest, start: float, target: float, steps: int) -> Schedule:
    return WarmupDamping(start, target, steps)


def _levenberg_marquardt(
    asked: RunRequest,
    start: float = 1e-3,
    every: int = 5,
    decay: float = 0.95,
    low: float = 1e-8,
    high: float = 1e2,
) -> LevenbergMarquardt:
    return LevenbergMarquardt(start, every, decay, low, high)


DAMPINGS: dict[str, Callable[..., Any]] = {
    "relative": lambda asked, share=0.1: Relative(share),
    "warmup": _warm_up,
    "step-decay": _step_decay,
    "levenberg-marquardt": _levenberg_marquardt,
}

SECOND_PASSES: dict[str, Callable[..., SecondPass]] = {
    "sam": lambda parameters, rho=0.05: SAM(parameters, rho),
    "adaptive-sam": lambda parameters, rho=0.5, eta=0.01: AdaptiveSAM(parameters, rho, eta),
    "gradient-norm": lambda parameters, tau, h=0.01: GradientNorm(parameters, tau, h),
}

PRECISIONS: dict[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
WIRES: dict[str, WireFormat] = {**PRECISIONS, "float21": float21}
