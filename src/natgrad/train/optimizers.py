"""What takes the steps: the optimizer, its learning rate as a function of the step, and K-FAC."""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from natgrad.curvature.fisher import EmpiricalFisher, ExactFisher, Fisher, MonteCarloFisher
from natgrad.inverses import Cholesky, Eigen
from natgrad.placement import (
    Auto,
    CommOpt,
    Hybrid,
    Local,
    MemOpt,
    ReduceScatter,
    Strategy,
)
from natgrad.preconditioner import KFAC
from natgrad.runtime.schedule import (
    CoupledMomentum,
    Doubling,
    PolynomialDecay,
    Schedule,
    StepDecay,
    WarmupDamping,
)
from natgrad.schemes import (
    LAMB,
    LARS,
    DisplacementMomentum,
    LinearWarmup,
    parameter_groups,
    steps_of,
)
from natgrad.train import rivals
from natgrad.train.objectives import Objective
from natgrad.train.settings import Settings


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
    match settings.schedule:
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


def optimizer(settings: Settings, model: nn.Module, lr: Schedule) -> Optimizer:
    groups = parameter_groups(model, settings.weight_decay)
    betas = (settings.momentum, 0.999)
    match settings.optimizer:
        case "adamw":
            return torch.optim.AdamW(groups, lr=settings.lr, betas=betas)
        case "lars":
            return LARS(groups, lr=settings.lr, momentum=settings.momentum)
        case "lamb":
            return LAMB(groups, lr=settings.lr, betas=betas)
        case "muon":
            return rivals.muon(settings, groups, model)
        case "soap":
            return rivals.soap(settings, groups)
        case "shampoo":
            return rivals.shampoo(settings, groups)
    coupled = CoupledMomentum(settings.momentum, lr) if settings.coupled else None
    if settings.displacement:
        plain = torch.optim.SGD(groups, lr=settings.lr)
        return DisplacementMomentum(plain, coupled or settings.momentum)
    return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum)


def set_rate(settings: Settings, inner: Optimizer, lr: Schedule, step: int) -> None:
    """Of a step; with it the momentum that is coupled to it."""
    for group in inner.param_groups:
        group["lr"] = lr(step)
    if settings.coupled and not settings.displacement:
        CoupledMomentum(settings.momentum, lr).couple(inner)


def preconditioner(
    settings: Settings, model: nn.Module, inner: Optimizer, objective: Objective
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
        decay=s.decay,
        kl_clip=s.kl_clip or None,
        update_every=intervals(s.update_every),
        refresh_every=intervals(s.refresh_every),
        curvature=_fisher(s, objective),
        norm_damping=s.norm_damping,
        inverse=Eigen() if s.inverse == "eigen" else Cholesky(),
        placement=placement(s),
        include=s.include or None,
        exclude=s.exclude,
        terms_per_sample=objective.terms,
        regions=objective.regions,
    )


def placement(settings: Settings) -> Strategy:
    named: dict[str, Strategy] = {
        "auto": Auto(),
        "comm": CommOpt(),
        "mem": MemOpt(),
        "hybrid": Hybrid(settings.fraction),
        "scatter": ReduceScatter(),
        "local": Local(),
    }
    return named[settings.placement]


def _interval(steps: int, *, ramp: bool) -> int | Schedule:
    return Doubling(steps) if ramp else steps


def _fisher(settings: Settings, objective: Objective) -> Fisher:
    match settings.fisher:
        case "monte-carlo":
            return MonteCarloFisher(seed=settings.seed, likelihood=objective.likelihood)
        case "exact":
            return ExactFisher(objective.likelihood)
    return EmpiricalFisher()
