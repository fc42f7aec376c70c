"""Optimizers of other libraries, for comparisons: Muon, SOAP and Shampoo by pytorch_optimizer."""

from importlib import import_module
from typing import Any

from torch import nn
from torch.optim import Optimizer

from natgrad.errors import SettingError

PACKAGE = "pytorch_optimizer"
Groups = list[dict[str, Any]]


def muon(groups: Groups, lr: float, momentum: float, model: nn.Module) -> Optimizer:
    """For the weights of all layers but embeddings; AdamW for the rest. Both have one learning
    rate, as the updates of both have entries of about that size."""
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    given = []
    for group in groups:
        weights = [p for p in group["params"] if p.ndim >= 2 and id(p) not in embedded]
        rest = [p for p in group["params"] if p.ndim < 2 or id(p) in embedded]
        shared = {k: v for k, v in group.items() if k in ("lr", "weight_decay")}
        shared.setdefault("lr", lr)
        if weights:
            given.append({**shared, "params": weights, "use_muon": True})
        if rest:
            given.append({**shared, "params": rest, "use_muon": False})
    made: Optimizer = _library("muon").Muon(given, lr=lr, momentum=momentum, use_adjusted_lr=True)
    return made


def soap(groups: Groups, lr: float, momentum: float) -> Optimizer:
    made: Optimizer = _library("soap").SOAP(groups, lr=lr, betas=(momentum, 0.95))
    return made


def shampoo(groups: Groups, lr: float, momentum: float) -> Optimizer:
    """That of the paper, with roots at every step: the library's with a longer interval divides by
    zero, and what the one for large models keeps cannot be saved as plain tensors."""
    made: Optimizer = _library("shampoo").Shampoo(
        groups, lr=lr, momentum=momentum, weight_decouple=True
    )
    return made


def _library(name: str) -> Any:
    try:
        return import_module("pytorch_optimizer")
    except ImportError:
        raise SettingError(
            f"optimizer {name} needs {PACKAGE}, which is not installed: pip install "
            "'natgrad[optimizers]'."
        ) from None
