"""Settings that change during training: values, intervals, and damping that adapts."""

from natgrad.schedules.intervals import (
    BatchInterval,
    Doubling,
    Drift,
    GrowingInterval,
    Staggered,
    TwoPhaseInterval,
)
from natgrad.schedules.trust_region import LevenbergMarquardt
from natgrad.schedules.values import (
    CoupledMomentum,
    PolynomialDecay,
    Schedule,
    StepDecay,
    WarmupDamping,
    value_at,
)

__all__ = [
    "BatchInterval",
    "CoupledMomentum",
    "Doubling",
    "Drift",
    "GrowingInterval",
    "LevenbergMarquardt",
    "PolynomialDecay",
    "Schedule",
    "Staggered",
    "StepDecay",
    "TwoPhaseInterval",
    "WarmupDamping",
    "value_at",
]
