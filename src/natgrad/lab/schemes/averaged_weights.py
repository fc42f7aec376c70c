"""Optimizers whose weights in training are not those that are tested: schedule-free ones.

A schedule-free optimizer (Defazio et al. 2024) trains at ``y`` and is judged at the average ``x``;
its ``eval()`` and ``train()`` go from one to the other in place, by a formula that rounds. Here the
training weights come back as they were, bit for bit, so that tests and checkpoints change nothing,
and a run that goes on is the one that was interrupted.

Running means of batch norm belong to ``y``. They are measured anew at ``x``, on training data, for
as long as that is tested, as its authors advise.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer


@runtime_checkable
class Averaging(Protocol):
    """An optimizer with two sets of weights."""

    def train(self) -> Any: ...

    def eval(self) -> Any: ...


def to_training(optimizer: Optimizer) -> None:
    """Before a step; nothing for optimizers with one set of weights."""
    if isinstance(optimizer, Averaging):
        optimizer.train()


def training_weights(optimizer: Optimizer) -> list[Tensor] | None:
    """What is trained, where that is not what is tested; None otherwise."""
    if not isinstance(optimizer, Averaging):
        return None
    return [p.detach().clone() for p in _parameters(optimizer)]


def restore(optimizer: Optimizer, weights: list[Tensor]) -> None:
    """Go on training at ``weights``."""
    to_training(optimizer)
    with torch.no_grad():
        for p, weight in zip(_parameters(optimizer), weights, strict=True):
            p.copy_(weight)


@contextmanager
def while_tested(
    optimizer: Optimizer, model: nn.Module, calibrate: Callable[[], None] | None = None
) -> Iterator[None]:
    """Meanwhile the model has the weights that are tested.

    ``calibrate`` runs the model, in training mode, on some training data, for batch norm.
    """
    kept = training_weights(optimizer)
    if kept is None:
        yield
        return
    assert isinstance(optimizer, Averaging)
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    buffers = [{n: b.clone() for n, b in norm.named_buffers()} for norm in norms]
    optimizer.eval()
    try:
        if norms and calibrate is not None:
            _measured(norms, calibrate)
        yield
    finally:
        for norm, own in zip(norms, buffers, strict=True):
            for name, buffer in norm.named_buffers():
                buffer.copy_(own[name])
        restore(optimizer, kept)


@torch.no_grad()
def _measured(norms: list[_BatchNorm], calibrate: Callable[[], None]) -> None:
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
    try:
        calibrate()
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
