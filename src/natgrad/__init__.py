"""Second-order training for PyTorch: a K-FAC preconditioner in two lines, and its matrices.

What has no name here is in a submodule: ``natgrad.schedules.Drift``. Everything loads on first use,
torch included.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from natgrad.lazy import lazily

if TYPE_CHECKING:
    from natgrad import comm as comm
    from natgrad import curvature as curvature
    from natgrad import errors as errors
    from natgrad import geometry as geometry
    from natgrad import integrations as integrations
    from natgrad import inverses as inverses
    from natgrad import lab as lab
    from natgrad import layers as layers
    from natgrad import least_squares as least_squares
    from natgrad import lengths as lengths
    from natgrad import measures as measures
    from natgrad import operators as operators
    from natgrad import placement as placement
    from natgrad import schedules as schedules
    from natgrad import structures as structures
    from natgrad.curvature import EmpiricalFisher, ExactFisher, Fisher, MonteCarloFisher
    from natgrad.damping import Relative
    from natgrad.errors import NatgradError
    from natgrad.geometry import Geometry, Spectral
    from natgrad.inverses import Cholesky, Eigen, Inverse
    from natgrad.kfac.ranks.distributed import Distributed
    from natgrad.layers import Elementwise, Layer, SharedInput, register
    from natgrad.lengths import Length, OutputChange, Rms
    from natgrad.loss_scale import MeanLoss, SumLoss
    from natgrad.operators import Operator, fisher, ggn, hessian
    from natgrad.optimizer import NaturalMuon
    from natgrad.placement import Auto, CommOpt, Hybrid, Local, MemOpt, Placement, ReduceScatter
    from natgrad.preconditioner import KFAC
    from natgrad.structures import EKFAC, Diagonal, Full, Kronecker, Structure, UnitWise
else:
    # Names here, and the submodule that each is taken from when it is first asked for.
    _FROM = {
        "curvature": "EmpiricalFisher ExactFisher Fisher MonteCarloFisher",
        "damping": "Relative",
        "errors": "NatgradError",
        "geometry": "Geometry Spectral",
        "inverses": "Cholesky Eigen Inverse",
        "kfac.ranks.distributed": "Distributed",
        "layers": "Elementwise Layer SharedInput register",
        "lengths": "Length OutputChange Rms",
        "loss_scale": "MeanLoss SumLoss",
        "operators": "Operator fisher ggn hessian",
        "optimizer": "NaturalMuon",
        "placement": "Auto CommOpt Hybrid Local MemOpt Placement ReduceScatter",
        "preconditioner": "KFAC",
        "structures": "EKFAC Diagonal Full Kronecker Structure UnitWise",
    }
    __getattr__, __dir__ = lazily(
        __name__,
        modules=(
            "comm",
            "curvature",
            "errors",
            "geometry",
            "integrations",
            "inverses",
            "lab",
            "layers",
            "least_squares",
            "lengths",
            "measures",
            "operators",
            "placement",
            "schedules",
            "structures",
        ),
        names={name: module for module, names in _FROM.items() for name in names.split()},
    )

try:
    __version__ = version("natgrad")
except PackageNotFoundError:  # imported from its sources, without being installed
    __version__ = "0+sources"

__all__ = [
    "EKFAC",
    "KFAC",
    "Auto",
    "Cholesky",
    "CommOpt",
    "Diagonal",
    "Distributed",
    "Eigen",
    "Elementwise",
    "EmpiricalFisher",
    "ExactFisher",
    "Fisher",
    "Full",
    "Geometry",
    "Hybrid",
    "Inverse",
    "Kronecker",
    "Layer",
    "Length",
    "Local",
    "MeanLoss",
    "MemOpt",
    "MonteCarloFisher",
    "NatgradError",
    "NaturalMuon",
    "Operator",
    "OutputChange",
    "Placement",
    "ReduceScatter",
    "Relative",
    "Rms",
    "SharedInput",
    "Spectral",
    "Structure",
    "SumLoss",
    "UnitWise",
    "fisher",
    "ggn",
    "hessian",
    "register",
]
