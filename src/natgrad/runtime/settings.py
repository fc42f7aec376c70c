"""Hyperparameters, checked when given and evaluated at each step."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from natgrad.errors import SettingError
from natgrad.runtime.blocks import Block
from natgrad.runtime.ranges import FRACTION, NOT_NEGATIVE, POSITIVE, number
from natgrad.runtime.scaling import LevenbergMarquardt
from natgrad.runtime.schedule import Clock, Drift, Schedule, Staggered, value_at

Interval = int | Schedule | Drift | Staggered
Intervals = Interval | Mapping[str, Interval]
Reduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class Values:
    """All hyperparameters at one step."""

    damping: float
    decay: float
    kl_clip: float | None
    norm_damping: float

    def damping_of(self, block: Block) -> float:
        """Norm layers have a damping of their own (O17)."""
        return self.damping * (self.norm_damping if block.normalises else 1.0)


@dataclass
class Settings:
    """``adapted`` is the damping as Levenberg-Marquardt has moved it."""

    damping: float | Schedule | LevenbergMarquardt
    decay: float | Schedule
    kl_clip: float | Schedule | None
    norm_damping: float | Schedule
    reduction: Reduction
    terms_per_sample: float
    adapted: float = 0.0

    def __post_init__(self) -> None:
        if self.reduction not in ("mean", "sum"):
            raise SettingError(
                f"reduction is {self.reduction!r} but must be 'mean' or 'sum': say which of them "
                "the loss is over the samples of a step."
            )
        number(self.terms_per_sample, "terms_per_sample", POSITIVE)
        if isinstance(self.damping, LevenbergMarquardt):
            self.adapted = self.damping.start
        self.at(0)

    def at(self, step: int) -> Values:
        damping = self.damping
        clip = self.kl_clip
        return Values(
            damping=self.adapted
            if isinstance(damping, LevenbergMarquardt)
            else value_at(damping, step, "damping", NOT_NEGATIVE),
            decay=value_at(self.decay, step, "decay", FRACTION),
            kl_clip=None if clip is None else value_at(clip, step, "kl_clip", POSITIVE),
            norm_damping=value_at(self.norm_damping, step, "norm_damping", NOT_NEGATIVE),
        )

    def statistics_scale(self, samples: int, *, observed: bool) -> float:
        """What captured gradients are multiplied by. Their outer products are averaged over N
        samples, but ``F = 1/(N T) Σ g gᵀ`` is a mean over all T terms of each, where ``g`` is of
        one term's own loss: that is how gradients of a sum come, and those that are ``observed``.
        """
        own = 1.0 if observed or self.reduction == "sum" else samples * self.terms_per_sample
        return own / math.sqrt(self.terms_per_sample)

    def gradient_scale(self, samples: int) -> float:
        """What makes the gradient of the loss that of the mean loss of a term."""
        return 1.0 if self.reduction == "mean" else 1.0 / (samples * self.terms_per_sample)


class Clocks:
    """One clock for factors of inputs, ``"A"``, and one for those of gradients, ``"G"`` (O31)."""

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

    @staticmethod
    def key(factor: str) -> str:
        return "A" if factor in ("A", "At") else "G"

    def due(self, step: int) -> set[str]:
        """The keys that are due by time alone."""
        return {key for key, clock in self.clocks.items() if clock.due(step)}

    def usual(self) -> int:
        """How many steps lie between two, once a run is on its way: for a plan's costs only."""
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
