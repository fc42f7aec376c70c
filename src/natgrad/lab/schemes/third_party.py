"""Optimizers of other libraries, for comparisons: Muon, SOAP, Shampoo and AdaBound by
pytorch_optimizer, Muon by torch, and schedule-free AdamW by schedulefree."""

from importlib import import_module
from typing import Any

from torch import nn
from torch.optim import Optimizer

from natgrad.errors import SettingError
from natgrad.lab.schemes.torch_muon import TorchMuon

PACKAGE = "pytorch_optimizer"
SCHEDULE_FREE = "schedulefree"
Groups = list[dict[str, Any]]


def muon(
    groups: Groups, lr: float, momentum: float, model: nn.Module, *, hidden: bool = False
) -> Optimizer:
    """For the weights of all layers but embeddings, or of ``hidden`` layers only; AdamW for the
    rest. Both have one learning rate, as the updates of both have entries of about that size."""
    embedded = _embeddings(model) | (_head(model) if hidden else set())
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


def torch_muon(groups: Groups, lr: float, momentum: float) -> Optimizer:
    """torch's, for every weight that is a matrix or a kernel, embeddings and heads as well."""
    return TorchMuon(groups, lr, momentum)


def soap(groups: Groups, lr: float, momentum: float, every: int = 10) -> Optimizer:
    made: Optimizer = _library("soap").SOAP(
        groups, lr=lr, betas=(momentum, 0.95), precondition_frequency=every
    )
    return made


def schedule_free(groups: Groups, lr: float, momentum: float) -> Optimizer:
    """AdamW whose weights are averages over the run, so that its rate need not fall."""
    try:
        library = import_module(SCHEDULE_FREE)
    except ImportError:
        raise SettingError(_missing("schedulefree", SCHEDULE_FREE)) from None
    made: Optimizer = library.AdamWScheduleFree(groups, lr=lr, betas=(momentum, 0.999))
    return made


def adabound(
    groups: Groups, lr: float, betas: tuple[float, float], *, largest: bool = False
) -> Optimizer:
    """Adam whose rates are held between bounds that close on 100 times ``lr``, the ratio of the
    paper (Luo et al. 2019), so that one number is to be tuned; with the ``largest`` second moment
    so far it is AMSBound."""
    made: Optimizer = _library("amsbound" if largest else "adabound").AdaBound(
        groups, lr=lr, final_lr=100 * lr, betas=betas, ams_bound=largest
    )
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
        raise SettingError(_missing(name, PACKAGE)) from None


def _missing(name: str, package: str) -> str:
    return (
        f"optimizer {name} needs {package}, which is not installed: pip install "
        "'natgrad[optimizers]'."
    )


def _embeddings(model: nn.Module) -> set[int]:
    return {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}


def _head(model: nn.Module) -> set[int]:
    """The weight of the layer that was registered last, which makes the output."""
    weights = [getattr(module, "weight", None) for module in model.modules()]
    matrices = [w for w in weights if isinstance(w, nn.Parameter) and w.ndim > 1]
    return {id(matrices[-1])} if matrices else set()
