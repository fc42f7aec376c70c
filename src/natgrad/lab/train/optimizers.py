"""What takes the steps: the optimizer, its learning rate as a function of the step, and K-FAC."""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from natgrad.curvature.fisher import Fisher
from natgrad.kfac.ranks.distributed import Distributed
from natgrad.lab.names import (
    CURVATURES,
    INVERSES,
    OPTIMIZERS,
    PLACEMENTS,
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
from natgrad.lab.train.settings import Settings
from natgrad.lab.train.task_losses import TaskObjective
from natgrad.loss_scale import MeanLoss
from natgrad.placement import Placement
from natgrad.preconditioner import KFAC
from natgrad.schedules import (
    CoupledMomentum,
    Doubling,
    PolynomialDecay,
    Schedule,
    StepDecay,
    WarmupDamping,
)


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
    settings: Settings, model: nn.Module, inner: Optimizer, objective: TaskObjective
) -> KFAC | None:
    s = settings
    if not s.kfac:
        return None
    intervals = partial(_interval, ramp=s.ramp)
    damping: float | Schedule = s.damping
    if s.damping_target:
        damping = WarmupDamping(s.damping, s.damping_target, s.damping_steps)
    return KFAC(
        model,
        inner,
        damping=damping,
        factor_decay=s.factor_decay,
        kl_clip=s.kl_clip or None,
        update_every=intervals(s.update_every),
        refresh_every=intervals(s.refresh_every),
        curvature=curvature(s, objective),
        norm_damping=s.norm_damping,
        inverse=INVERSES[s.inverse](),
        include=s.include or None,
        exclude=s.exclude,
        loss=MeanLoss(objective.terms, objective.regions),
        distributed=Distributed(placement(s)),
    )


def curvature(settings: Settings, objective: TaskObjective) -> Fisher:
    asked = CurvatureRequest(objective.likelihood, seed=settings.seed)
    return CURVATURES[settings.fisher](asked)


def placement(settings: Settings) -> Placement:
    return PLACEMENTS[settings.placement](PlacementRequest(settings.fraction))


def _interval(steps: int, *, ramp: bool) -> int | Schedule:
    return Doubling(steps) if ramp else steps
