"""What else a training is made of, each usable in any loop and with any optimizer."""

from natgrad.runtime.schedule import CoupledMomentum, PolynomialDecay, StepDecay, WarmupDamping
from natgrad.schemes.displacement import DisplacementMomentum
from natgrad.schemes.erasing import RandomErasing
from natgrad.schemes.gradient_norm import GradientNorm, penalized
from natgrad.schemes.lamb import LAMB
from natgrad.schemes.large_batch import LARGE_BATCH, LargeBatch, large_batch, large_batch_table
from natgrad.schemes.lars import LARS
from natgrad.schemes.lookahead import Lookahead
from natgrad.schemes.mixup import RunningMixup
from natgrad.schemes.normalized import normalized_layers
from natgrad.schemes.rates import LinearWarmup, relative, steps_of
from natgrad.schemes.rescaling import WeightRescaling
from natgrad.schemes.sam import SAM, AdaptiveSAM
from natgrad.schemes.second_pass import frozen_statistics
from natgrad.schemes.soft_targets import one_hot, smooth, soft_cross_entropy
from natgrad.schemes.trust import parameter_groups

__all__ = [
    "LAMB",
    "LARGE_BATCH",
    "LARS",
    "SAM",
    "AdaptiveSAM",
    "CoupledMomentum",
    "DisplacementMomentum",
    "GradientNorm",
    "LargeBatch",
    "LinearWarmup",
    "Lookahead",
    "PolynomialDecay",
    "RandomErasing",
    "RunningMixup",
    "StepDecay",
    "WarmupDamping",
    "WeightRescaling",
    "frozen_statistics",
    "large_batch",
    "large_batch_table",
    "normalized_layers",
    "one_hot",
    "parameter_groups",
    "penalized",
    "relative",
    "smooth",
    "soft_cross_entropy",
    "steps_of",
]
