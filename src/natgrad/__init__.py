"""Second-order training for PyTorch: a K-FAC preconditioner in two lines."""

from natgrad.comm import CommunicationError
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
from natgrad.placement import (
    Auto,
    Cluster,
    CommOpt,
    Hybrid,
    Local,
    MemOpt,
    Plan,
    ReduceScatter,
    simulate,
)
from natgrad.preconditioner import KFAC
from natgrad.runtime.scaling import LevenbergMarquardt
from natgrad.runtime.schedule import (
    BatchInterval,
    CoupledMomentum,
    Doubling,
    Drift,
    GrowingInterval,
    PolynomialDecay,
    Staggered,
    StepDecay,
    TwoPhaseInterval,
    WarmupDamping,
)
from natgrad.runtime.team import Wire
from natgrad.structures import EKFAC, Diagonal, Full, Kronecker, UnitWise

__all__ = [
    "EKFAC",
    "KFAC",
    "Auto",
    "BatchInterval",
    "Bernoulli",
    "CaptureError",
    "Categorical",
    "CheckpointError",
    "Cholesky",
    "Cluster",
    "CommOpt",
    "CommunicationError",
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
    "Hybrid",
    "Kronecker",
    "Layer",
    "LevenbergMarquardt",
    "Local",
    "MemOpt",
    "MonteCarloFisher",
    "NatgradError",
    "NotCovered",
    "Plan",
    "PolynomialDecay",
    "ReduceScatter",
    "SettingError",
    "SharedInput",
    "Staggered",
    "StepDecay",
    "TwoPhaseInterval",
    "UnitWise",
    "WarmupDamping",
    "Wire",
    "register",
    "simulate",
]
