"""What takes the steps: the optimizer, its learning rate as a function of the step, and K-FAC."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from natgrad.capture.discovery import default_structure
from natgrad.curvature.fisher import Fisher
from natgrad.curvature.subsample import Subsample
from natgrad.kfac.clocks import Intervals
from natgrad.kfac.ranks.distributed import Distributed
from natgrad.lab.names import (
    CURVATURES,
    DAMPINGS,
    GEOMETRIES,
    INTERVALS,
    INVERSES,
    LENGTHS,
    OPTIMIZERS,
    PLACEMENTS,
    STRUCTURES,
    SUBSAMPLES,
    CurvatureRequest,
    PlacementRequest,
)
from natgrad.lab.registry import is_path
from natgrad.lab.schemes import (
    DisplacementMomentum,
    LinearWarmup,
    parameter_groups,
    steps_of,
)
from natgrad.lab.schemes.optimizers_by_name import OptimizerRequest
from natgrad.lab.schemes.settings_by_name import PRECISIONS, WIRES, RunRequest, interval_of
from natgrad.lab.train.settings import Settings, Spec
from natgrad.lab.train.task_losses import TaskObjective
from natgrad.layers import Layer
from natgrad.loss_scale import MeanLoss
from natgrad.placement import Placement
from natgrad.preconditioner import KFAC
from natgrad.schedules import (
    CoupledMomentum,
    PolynomialDecay,
    Schedule,
    StepDecay,
    WarmupDamping,
)
from natgrad.structures import Structure


@dataclass(frozen=True)
class Cosine:
    """``start (1 + cos(π x)) / 2`` with ``x`` from 0 at the step ``begin`` to 1 at ``end``."""

    start: float
    begin: float
    end: float

    def __call__(self, step: int) -> float:
        x = (step - self.begin) / max(1.0, self.end - self.begin)
        return self.start * (1 + math.cos(math.pi * min(1.0, max(0.0, x)))) / 2


@dataclass(frozen=True)
class Constant:
    value: float

    def __call__(self, step: int) -> float:
        return self.value


def rate(settings: Settings, steps_per_epoch: float, steps: int) -> Schedule:
    """The learning rate; ``steps`` of the whole run, at which it ends if nothing else is said."""
    begin = settings.decay_begin
    end = settings.decay_end or max(steps / steps_per_epoch, begin + 1 / steps_per_epoch)
    found: Schedule
    named = OPTIMIZERS[settings.optimizer]
    match "constant" if named.schedule_free else settings.schedule:
        case "polynomial":
            power = settings.decay_power
            found = PolynomialDecay(settings.lr, begin, end, power, steps_per_epoch)
        case "cosine":
            found = Cosine(settings.lr, begin * steps_per_epoch, end * steps_per_epoch)
        case "steps":
            # Two epochs that are one step apart, or none, still fall twice.
            at: list[int] = []
            for step in steps_of(settings.decay_at, steps_per_epoch):
                at.append(max(step, at[-1] + 1 if at else 0))
            found = StepDecay(settings.lr, settings.decay_factor, tuple(at))
        case _:
            found = Constant(settings.lr)
    warm = round(settings.warmup_share * steps or settings.warmup * steps_per_epoch)
    # Not from 0: a step without a rate would be lost.
    return LinearWarmup(found, warm, 1 / warm) if warm > 1 else found


def optimizer(
    settings: Settings,
    model: nn.Module,
    lr: Schedule,
    objective: TaskObjective | None = None,
    wrapped: nn.Module | None = None,
) -> Optimizer:
    """``wrapped``: the model as DDP wraps it, if it does."""
    groups = parameter_groups(model, settings.weight_decay)
    if settings.displacement:  # of sgd alone
        coupled = CoupledMomentum(settings.momentum, lr) if settings.coupled else None
        plain = torch.optim.SGD(groups, lr=settings.lr)
        return DisplacementMomentum(plain, coupled or settings.momentum)
    asked = OptimizerRequest(
        groups,
        settings.lr,
        settings.momentum,
        wrapped or model,
        None if objective is None else curvature(settings, objective),
        Distributed(placement(settings)),
    )
    return OPTIMIZERS[settings.optimizer].build(asked)


def check(settings: Settings, model: nn.Module) -> None:
    """Whether an optimizer of the user's can be made, before anything takes long."""
    if is_path(settings.optimizer):
        optimizer(settings, model, Constant(settings.lr))


def set_rate(settings: Settings, inner: Optimizer, lr: Schedule, step: int) -> None:
    """Of a step; with it the momentum that is coupled to it."""
    for group in inner.param_groups:
        group["lr"] = lr(step)
    if settings.coupled and not settings.displacement:
        CoupledMomentum(settings.momentum, lr).couple(inner)


def preconditioner(
    settings: Settings,
    model: nn.Module,
    inner: Optimizer,
    objective: TaskObjective,
    steps_per_epoch: float = 1.0,
) -> KFAC | None:
    s = settings
    if not s.kfac:
        return None
    asked = RunRequest(steps_per_epoch, s.batch_size, s.ramp)
    length = LENGTHS[s.length]() if s.length else None
    kfac = KFAC(
        model,
        inner,
        damping=_damping(s, asked),
        factor_decay=s.factor_decay,
        kl_clip=s.kl_clip or None,
        update_every=_intervals(s.update_every, asked),
        refresh_every=_intervals(s.refresh_every, asked),
        curvature=curvature(s, objective),
        statistics=_statistics(s),
        structure=_structure(s),
        norm_damping=s.norm_damping,
        inverse=INVERSES[s.inverse](),
        geometry=GEOMETRIES[s.geometry](),
        length=length,
        include=s.include or None,
        exclude=s.exclude,
        max_dim=s.max_dim or None,
        loss=MeanLoss(objective.terms, objective.regions),
        distributed=Distributed(placement(s), wire_dtype=WIRES.get(s.wire_dtype)),
        factor_dtype=PRECISIONS.get(s.factor_dtype),
    )
    return kfac if length is None or not length.of_update else kfac.attach()


def curvature(settings: Settings, objective: TaskObjective) -> Fisher:
    asked = CurvatureRequest(objective.likelihood, seed=settings.seed)
    return CURVATURES[settings.fisher](asked)


def placement(settings: Settings) -> Placement:
    return PLACEMENTS[settings.placement](PlacementRequest(settings.fraction))


def _damping(s: Settings, asked: RunRequest) -> Any:
    if isinstance(s.damping, str):
        return DAMPINGS[s.damping](asked)
    if s.damping_target:
        return WarmupDamping(s.damping, s.damping_target, s.damping_steps)
    return s.damping


def _intervals(given: Spec, asked: RunRequest) -> Intervals:
    if isinstance(given, str):
        return INTERVALS[given](asked)
    return interval_of(asked, int(given))


def _statistics(s: Settings) -> float | Subsample | None:
    if isinstance(s.statistics, str):
        return SUBSAMPLES[s.statistics]()
    return s.statistics or None


def _structure(s: Settings) -> Callable[[Layer[Any]], Structure] | None:
    if not s.structure and s.norm_structure == "unitwise":
        return None  # as usual
    usual = STRUCTURES[s.structure]() if s.structure else None
    of_norms = STRUCTURES[s.norm_structure]()

    def structure(layer: Layer[Any]) -> Structure:
        if layer.normalises:
            return of_norms
        return usual if usual is not None and usual.fits(layer) else default_structure(layer)

    return structure
