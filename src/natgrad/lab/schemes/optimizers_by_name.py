"""Optimizers by name: one registration says how each is built, what it is called, around which
learning rate a comparison looks for its best, and which package it comes with."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from natgrad.curvature.fisher import Fisher
from natgrad.kfac.ranks.distributed import Distributed
from natgrad.lab import registry
from natgrad.lab.schemes import third_party
from natgrad.lab.schemes.lamb import LAMB
from natgrad.lab.schemes.lars import LARS
from natgrad.lab.schemes.lookahead import Lookahead
from natgrad.optimizer import NaturalMuon

# The middle of the learning rates that are tried of an optimizer that does not say its own.
USUAL_RATE = 1e-2


@dataclass(frozen=True)
class OptimizerRequest:
    """What it is built from: ``params`` are groups as torch takes them, with the weight decay of
    each; ``model`` has all of them. For those that use the curvature: which, and on which ranks."""

    params: list[dict[str, Any]]
    lr: float
    momentum: float = 0.9
    model: nn.Module = field(default_factory=nn.Module)
    curvature: Fisher | None = None
    distributed: Distributed = Distributed()  # noqa: RUF009 (frozen)

    @property
    def betas(self) -> tuple[float, float]:
        return self.momentum, 0.999


@dataclass(frozen=True)
class NamedOptimizer:
    """``title`` and what it is ``about`` stand in tables. ``lr`` is the middle of the learning
    rates that a comparison tries, ``lr_with_kfac`` that with K-FAC in front of it (None: the same).
    ``momentum`` is what it has there, and ``package`` what must be installed for it. One that is
    ``schedule_free`` has a rate that rises in a warm-up and then stays."""

    title: str
    about: str
    build: Callable[[OptimizerRequest], Optimizer]
    lr: float = USUAL_RATE
    lr_with_kfac: float | None = None
    momentum: float = 0.9
    package: str = ""
    schedule_free: bool = False

    def missing(self) -> str:
        """A sentence if its package is not installed, otherwise nothing."""
        if not self.package or _found(self.package):
            return ""
        return (
            f"{self.title} comes with {self.package}, which is not installed: pip install "
            "'natgrad[optimizers]'."
        )


def own_optimizer(path: str, found: Any) -> NamedOptimizer:
    """Of a class of torch's kind, a function ``(params, lr)`` that returns an optimizer, or a
    `NamedOptimizer`."""
    if isinstance(found, NamedOptimizer):
        return found
    function = registry.function(path, "Optimizer", "a torch.optim.Optimizer", found)
    is_class = isinstance(function, type)

    def build(asked: OptimizerRequest) -> Optimizer:
        made_by = (lambda: function(asked.params, lr=asked.lr)) if is_class else function
        given = () if is_class else (asked.params, asked.lr)
        takes = "takes parameters and a learning rate"
        return registry.call(made_by, path, "Optimizer", Optimizer, *given, takes=takes)

    return NamedOptimizer(path.rpartition(":")[2], path, build)


def _found(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _adamw(asked: OptimizerRequest) -> Optimizer:
    return torch.optim.AdamW(asked.params, lr=asked.lr, betas=asked.betas)


def _adam(asked: OptimizerRequest) -> Optimizer:
    return torch.optim.Adam(asked.params, lr=asked.lr, betas=asked.betas)


def _amsgrad(asked: OptimizerRequest) -> Optimizer:
    return torch.optim.Adam(asked.params, lr=asked.lr, betas=asked.betas, amsgrad=True)


def _radam(asked: OptimizerRequest) -> Optimizer:
    return torch.optim.RAdam(asked.params, lr=asked.lr, betas=asked.betas)


def _adabound(asked: OptimizerRequest) -> Optimizer:
    return third_party.adabound(asked.params, asked.lr, asked.betas)


def _amsbound(asked: OptimizerRequest) -> Optimizer:
    return third_party.adabound(asked.params, asked.lr, asked.betas, largest=True)


def _lookahead(asked: OptimizerRequest) -> Optimizer:
    return Lookahead(_sgd(asked))


def _lookahead_adam(asked: OptimizerRequest) -> Optimizer:
    return Lookahead(_adam(asked))


def _sgd(asked: OptimizerRequest) -> Optimizer:
    return torch.optim.SGD(asked.params, lr=asked.lr, momentum=asked.momentum)


def _lars(asked: OptimizerRequest) -> Optimizer:
    return LARS(asked.params, lr=asked.lr, momentum=asked.momentum)


def _lamb(asked: OptimizerRequest) -> Optimizer:
    return LAMB(asked.params, lr=asked.lr, betas=asked.betas)


def _muon(asked: OptimizerRequest) -> Optimizer:
    return third_party.muon(asked.params, asked.lr, asked.momentum, asked.model)


def _hidden_muon(asked: OptimizerRequest) -> Optimizer:
    return third_party.muon(asked.params, asked.lr, asked.momentum, asked.model, hidden=True)


def _torch_muon(asked: OptimizerRequest) -> Optimizer:
    return third_party.torch_muon(asked.params, asked.lr, asked.momentum)


def _soap(asked: OptimizerRequest) -> Optimizer:
    return third_party.soap(asked.params, asked.lr, asked.momentum)


def _eager_soap(asked: OptimizerRequest) -> Optimizer:
    return third_party.soap(asked.params, asked.lr, asked.momentum, every=1)


def _schedule_free(asked: OptimizerRequest) -> Optimizer:
    return third_party.schedule_free(asked.params, asked.lr, asked.momentum)


def _shampoo(asked: OptimizerRequest) -> Optimizer:
    return third_party.shampoo(asked.params, asked.lr, asked.momentum)


def _natural_muon(asked: OptimizerRequest) -> Optimizer:
    return NaturalMuon(
        asked.model,
        asked.lr,
        params=asked.params,
        momentum=asked.momentum,
        curvature=asked.curvature,
        distributed=asked.distributed,
    )


_ADAM = "betas 0.9 and 0.999"
_BOUND = "betas 0.9 and 0.999, bounds that close on 100 times the rate"
_BACK = "half of the way back every 5 steps"
_MUON = "momentum 0.95; AdamW for embeddings, biases and norm layers"
_HIDDEN = "momentum 0.95; AdamW for embeddings, the head, biases and norm layers"
_TORCH = "torch.optim.Muon, momentum 0.95; AdamW for biases and norm layers"
_SOAP = "betas 0.95 and 0.95, a new basis every"
_OTHERS: dict[str, Any] = {"momentum": 0.95, "package": third_party.PACKAGE}

NAMED: dict[str, NamedOptimizer] = {
    "sgd": NamedOptimizer("SGD", "momentum 0.9", _sgd, 0.1, lr_with_kfac=0.03),
    "adamw": NamedOptimizer("AdamW", _ADAM, _adamw, 3e-3),
    "adam": NamedOptimizer("Adam", _ADAM, _adam, 3e-3),
    "amsgrad": NamedOptimizer("AMSGrad", _ADAM, _amsgrad, 3e-3),
    "radam": NamedOptimizer("RAdam", _ADAM, _radam, 3e-3),
    "adabound": NamedOptimizer("AdaBound", _BOUND, _adabound, 3e-3, package=third_party.PACKAGE),
    "amsbound": NamedOptimizer("AMSBound", _BOUND, _amsbound, 3e-3, package=third_party.PACKAGE),
    "lookahead": NamedOptimizer(
        "Lookahead, SGD", f"momentum 0.9, {_BACK}", _lookahead, 0.1, lr_with_kfac=0.03
    ),
    "lookahead-adam": NamedOptimizer("Lookahead, Adam", f"{_ADAM}, {_BACK}", _lookahead_adam, 3e-3),
    "lars": NamedOptimizer("LARS", "momentum 0.9, trust 0.001", _lars, 10.0),
    "lamb": NamedOptimizer("LAMB", _ADAM, _lamb, 1e-2),
    "schedulefree": NamedOptimizer(
        "AdamW, schedule-free",
        "betas 0.9 and 0.999, no decay of the rate",
        _schedule_free,
        3e-3,
        package=third_party.SCHEDULE_FREE,
        schedule_free=True,
    ),
    "muon": NamedOptimizer("Muon", _MUON, _muon, 0.02, **_OTHERS),
    "muon-hidden": NamedOptimizer("Muon, hidden layers", _HIDDEN, _hidden_muon, 0.02, **_OTHERS),
    "torch-muon": NamedOptimizer("Muon by torch", _TORCH, _torch_muon, 0.02, momentum=0.95),
    "soap": NamedOptimizer("SOAP", f"{_SOAP} 10 steps", _soap, 3e-3, **_OTHERS),
    "soap-1": NamedOptimizer("SOAP, every step", f"{_SOAP} step", _eager_soap, 3e-3, **_OTHERS),
    "naturalmuon": NamedOptimizer(
        "NaturalMuon",
        "natgrad.NaturalMuon(model) as it stands",
        _natural_muon,
        1e-2,
    ),
    "shampoo": NamedOptimizer(
        "Shampoo",
        "momentum 0.9, new roots at every step",
        _shampoo,
        0.3,
        package=third_party.PACKAGE,
    ),
}
