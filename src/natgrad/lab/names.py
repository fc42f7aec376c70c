"""Every name that a command or a file of settings may have, and the object that it stands for.

Each is registered here and nowhere else. Wherever a name is taken, ``module:function`` is taken as
well: an object of the user's own (`Registry`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from natgrad.curvature.fisher import EmpiricalFisher, ExactFisher, Fisher, MonteCarloFisher
from natgrad.curvature.likelihoods import Categorical, Likelihood
from natgrad.curvature.losses import BinaryCrossEntropy, CrossEntropy, Loss, SquareLoss, as_loss
from natgrad.curvature.subsample import Subsample
from natgrad.geometry import Elementwise, Euclidean, Geometry, Spectral
from natgrad.inverses import Cholesky, Eigen, Inverse, LowRank
from natgrad.kfac.clocks import Intervals
from natgrad.lab import registry
from natgrad.lab.data import by_name as data_by_name
from natgrad.lab.data.by_name import NamedData
from natgrad.lab.data.own_data import own_data
from natgrad.lab.models import by_name as networks_by_name
from natgrad.lab.models.by_name import NamedNetwork, own_network
from natgrad.lab.registry import Makers, Registry, factories
from natgrad.lab.schemes import optimizers_by_name, settings_by_name
from natgrad.lab.schemes.optimizers_by_name import NamedOptimizer, own_optimizer
from natgrad.lab.schemes.second_pass import SecondPass
from natgrad.lab.schemes.settings_by_name import RunRequest
from natgrad.layers import registered
from natgrad.lengths import Dogleg, Graft, Length, OutputChange, Rms
from natgrad.placement import (
    Auto,
    Cluster,
    CommOpt,
    CostModel,
    Flops,
    Hybrid,
    Local,
    MemOpt,
    Placement,
    ReduceScatter,
)
from natgrad.structures import EKFAC, Diagonal, Full, Kronecker, Structure, UnitWise

STRUCTURES: Makers[Structure] = factories(
    "structure",
    Structure,
    {
        "block": Full,
        "kronecker": Kronecker,
        "kronecker-reduce": lambda: Kronecker("reduce"),
        "ekfac": EKFAC,
        "unitwise": UnitWise,
        "diagonal": Diagonal,
    },
)

INVERSES: Makers[Inverse] = factories(
    "inverse", Inverse, {"eigen": Eigen, "cholesky": Cholesky, "low-rank": LowRank}
)


@dataclass(frozen=True)
class PlacementRequest:
    """What some placements are made from: the ``fraction`` of the ranks that precondition a layer,
    the most bytes that one may keep, how fast the machines are, and what they are given to do."""

    fraction: float = 0.5
    memory_limit: int | None = None
    cluster: Cluster = field(default_factory=Cluster)
    cost: CostModel = field(default_factory=Flops)


def _own_placement(path: str, found: Any) -> Callable[[PlacementRequest], Placement]:
    """A function from blocks and ranks to a plan, or a class of such."""
    function = registry.function(path, "Placement", "a Plan", found)
    return lambda _: function() if isinstance(function, type) else function


PLACEMENTS: Registry[Callable[[PlacementRequest], Placement]] = Registry(
    "placement",
    "a function (blocks, world) that returns a Plan",
    _own_placement,
    {
        "auto": lambda asked: Auto(asked.memory_limit, cluster=asked.cluster, cost=asked.cost),
        "comm": lambda asked: CommOpt(cluster=asked.cluster, cost=asked.cost),
        "mem": lambda asked: MemOpt(cluster=asked.cluster, cost=asked.cost),
        "hybrid": lambda asked: Hybrid(asked.fraction, cluster=asked.cluster, cost=asked.cost),
        "scatter": lambda asked: ReduceScatter(cluster=asked.cluster, cost=asked.cost),
        "local": lambda asked: Local(cluster=asked.cluster, cost=asked.cost),
    },
)


@dataclass(frozen=True)
class CurvatureRequest:
    """What some curvatures are made from: whose targets are drawn, how many, by which seed."""

    likelihood: Likelihood = field(default_factory=Categorical)
    draws: int = 1
    seed: int = 0


def _monte_carlo(
    asked: CurvatureRequest, draws: int | None = None, seed: int | None = None
) -> Fisher:
    return MonteCarloFisher(
        asked.draws if draws is None else draws,
        asked.seed if seed is None else seed,
        asked.likelihood,
    )


CURVATURES: Makers[Fisher] = factories(
    "curvature",
    Fisher,
    {
        "empirical": lambda asked: EmpiricalFisher(),
        "monte-carlo": _monte_carlo,
        "exact": lambda asked: ExactFisher(asked.likelihood),
    },
    given=(CurvatureRequest(),),
)

# Any run will do to try settings on; in this one no two epochs are the same step.
_RUN = RunRequest(steps_per_epoch=1e6)

INTERVALS: Makers[Intervals] = Makers(
    "interval",
    "a function of the step",
    settings_by_name.own_schedule("interval", "a number of steps"),
    settings_by_name.INTERVALS,
    given=(_RUN,),
)

DAMPINGS: Makers[Any] = Makers(
    "damping",
    "a function of the step",
    settings_by_name.own_schedule("damping", "a damping"),
    settings_by_name.DAMPINGS,
    given=(_RUN,),
)

GEOMETRIES: Makers[Geometry] = factories(
    "geometry",
    Geometry,
    {"euclidean": Euclidean, "spectral": Spectral, "elementwise": Elementwise},
)

LENGTHS: Makers[Length] = factories(
    "length",
    Length,
    {"rms": Rms, "output-change": OutputChange, "graft": Graft, "dogleg": Dogleg},
)

SUBSAMPLES: Makers[Subsample] = factories(
    "choice of samples", Subsample, {"subsample": lambda amount, seed=0: Subsample(amount, seed)}
)

SECOND_PASSES: Makers[SecondPass] = Makers(
    "second pass",
    "a SecondPass of your own",
    settings_by_name.own_second_pass,
    settings_by_name.SECOND_PASSES,
    given=([torch.zeros(1)],),
)

OPTIMIZERS: Registry[NamedOptimizer] = Registry(
    "optimizer",
    "an optimizer class, or a function (params, lr) that returns one,",
    own_optimizer,
    optimizers_by_name.NAMED,
)

NETWORKS: Registry[NamedNetwork] = Registry(
    "network",
    "a function that builds one",
    own_network,
    networks_by_name.NAMED,
)

DATA: Registry[NamedData] = Registry(
    "data set",
    "a function that returns training and test data",
    own_data,
    data_by_name.NAMED,
)


def _own_loss(path: str, found: Any) -> Callable[[], Loss]:
    function = registry.function(path, "Loss", "the mean loss over samples", found)
    return lambda: as_loss(function)


# Losses with a Hessian of the output, for matrices.
LOSSES: Registry[Callable[[], Loss]] = Registry(
    "loss",
    "a function of (output, target)",
    _own_loss,
    {"cross-entropy": CrossEntropy, "square": SquareLoss, "binary": BinaryCrossEntropy},
)


@dataclass(frozen=True)
class TaskLoss:
    """A loss of training: the ``metrics`` that come with it, and ``function``, that of the user's
    own, a mean over samples."""

    metrics: tuple[str, ...] = ("loss",)
    function: Callable[..., Any] | None = None


def _own_task_loss(path: str, found: Any) -> TaskLoss:
    return TaskLoss(function=registry.function(path, "Loss", "the mean loss over samples", found))


PRECISION_METRICS = ("box_ap", "box_ap50", "mask_ap", "mask_ap50")
_TEXT_METRICS = ("loss", "accuracy", "perplexity")

# Losses with metrics, for training.
TASK_LOSSES: Registry[TaskLoss] = Registry(
    "loss",
    "a function of (output, target)",
    _own_task_loss,
    {
        "cross-entropy": TaskLoss(("loss", "accuracy")),
        "reconstruction": TaskLoss(),
        "pixels": TaskLoss(("loss", "accuracy", "dice")),
        "tokens": TaskLoss(_TEXT_METRICS),
        "masked-tokens": TaskLoss(_TEXT_METRICS),
        "instances": TaskLoss(("loss", *PRECISION_METRICS)),
    },
)


class LayerNames(Registry[Any]):
    """Layers, by the names of their modules: they are registered by `natgrad.register`, where a
    module of the user's does so as soon as it is imported."""

    def entries(self) -> Mapping[str, Any]:
        return registered()


LAYERS = LayerNames("layer", "a Layer class of your own", lambda path, found: found)
