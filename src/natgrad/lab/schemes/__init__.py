"""What else a training is made of, each usable in any loop and with any optimizer."""

from natgrad.lab.schemes.displacement import DisplacementMomentum
from natgrad.lab.schemes.erasing import RandomErasing
from natgrad.lab.schemes.gradient_norm import GradientNorm, penalized
from natgrad.lab.schemes.lamb import LAMB
from natgrad.lab.schemes.large_batch import LARGE_BATCH, LargeBatch, large_batch, large_batch_table
from natgrad.lab.schemes.lars import LARS
from natgrad.lab.schemes.lookahead import Lookahead
from natgrad.lab.schemes.mixup import RunningMixup
from natgrad.lab.schemes.normalized import normalized_layers
from natgrad.lab.schemes.rates import LinearWarmup, relative, steps_of
from natgrad.lab.schemes.rescaling import WeightRescaling
from natgrad.lab.schemes.sam import SAM, AdaptiveSAM
from natgrad.lab.schemes.second_pass import frozen_statistics
from natgrad.lab.schemes.soft_targets import one_hot, smooth, soft_cross_entropy
from natgrad.lab.schemes.trust_ratio import parameter_groups
from natgrad.schedules import CoupledMomentum, PolynomialDecay, StepDecay, WarmupDamping

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
