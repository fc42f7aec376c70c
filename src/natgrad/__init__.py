"""Second-order training for PyTorch: a K-FAC preconditioner in two lines."""

from natgrad.curvature.fisher import EmpiricalFisher, ExactFisher, MonteCarloFisher
from natgrad.curvature.likelihoods import Bernoulli, Categorical, Gaussian
from natgrad.errors import (
    CaptureError,
    CheckpointError,
    CoverageError,
    NatgradError,
    SettingError,
)
from natgrad.inverses import Cholesky, Eigen
from natgrad.layers import Elementwise, Layer, NotCovered, SharedInput, register
from natgrad.preconditioner import KFAC
from natgrad.runtime.scaling import LevenbergMarquardt
from natgrad.runtime.schedule import (
    BatchInterval,
    CoupledMomentum,
    Doubling,
    Drift,
    GrowingInterval,
    PolynomialDecay,
    StepDecay,
    TwoPhaseInterval,
    WarmupDamping,
)
from natgrad.structures import EKFAC, Diagonal, Full, Kronecker, UnitWise

__all__ = [
    "EKFAC",
    "KFAC",
    "BatchInterval",
    "Bernoulli",
    "CaptureError",
    "Categorical",
    "CheckpointError",
    "Cholesky",
    "CoupledMomentum",
    "CoverageError",
    "Diagonal",
    "Doubling",
    "Drift",
    "Eigen",
    "Elementwise",
    "EmpiricalFisher",
    "ExactFisher",
    "Full",
    "Gaussian",
    "GrowingInterval",
    "Kronecker",
    "Layer",
    "LevenbergMarquardt",
    "MonteCarloFisher",
    "NatgradError",
    "NotCovered",
    "PolynomialDecay",
    "SettingError",
    "SharedInput",
    "StepDecay",
    "TwoPhaseInterval",
    "UnitWise",
    "WarmupDamping",
    "register",
]
