"""Models in wrappers, compiled models, autocast and gradient scalers.

Hooks come and go with the steps, and compiled code does not look for hooks that come later. So
compiled modules run eagerly on the steps that update the curvature, and compiled, without any hook,
on all others: nine steps of ten, once the default intervals are reached.

Statistics and preconditioning keep their precision inside autocast. A GradScaler's loss scale is
taken out of ``.grad`` by ``unscale_``, and out of captured gradients by division.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from natgrad.comm.layouts import AVERAGING


def is_compiled(module: nn.Module) -> bool:
    """Whether it is what ``torch.compile`` returns. Nothing is, unless the compiler was imported,
    which takes half a second."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside ``torch.compile`` and data-parallel wrappers."""
    while True:
        if is_compiled(model):
            model = model._orig_mod  # type: ignore[assignment]
        elif isinstance(model, (*AVERAGING, nn.DataParallel)):
            model = model.module  # type: ignore[assignment]
        else:
            return model


class Compiled:
    """All compiled modules in and around a model."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self.eager = model, False
        self._modules: list[tuple[nn.Module, Any]] = []  # that run eagerly for the moment
        self._all: list[nn.Module] = []
        self._wrappers: list[tuple[nn.Module, Any]] = []
        self.follow()

    def follow(self) -> None:
        """The model may have other modules than before, which are then switched as the others."""
        eager = self.eager
        self.run_eagerly(False)
        self._all = list(self._model.modules())
        self._wrappers = [(m, m.forward) for m in self._all if is_compiled(m)]
        self.run_eagerly(eager)

    @property
    def found(self) -> bool:
        some = bool(self._wrappers or self._modules)
        return some or any(m._compiled_call_impl for m in self._all)

    def run_eagerly(self, wanted: bool) -> None:
        """Switch every compiled module over; what was compiled stays compiled for the next time."""
        if wanted == self.eager:
            return
        self.eager = wanted
        for wrapper, compiled in self._wrappers:
            inside: Any = wrapper._orig_mod
            wrapper.forward = inside.__call__ if wanted else compiled
        if wanted:
            self._modules = [(m, m._compiled_call_impl) for m in self._all if m._compiled_call_impl]
            for module, _ in self._modules:
                module._compiled_call_impl = None
        else:
            for module, compiled in self._modules:
                module._compiled_call_impl = compiled
            self._modules = []


@contextmanager
def no_autocast(device: torch.device) -> Iterator[None]:
    """Tensors keep their precision, also if backward() or step() is called inside autocast."""
    if not torch.is_autocast_enabled(device.type):
        yield
        return
    with torch.autocast(device.type, enabled=False):
        yield


def unscale(scaler: GradScaler | None, optimizers: Sequence[Optimizer]) -> float:
    """Unscale ``.grad``, unless the user did; returns the loss scale of captured gradients."""
    if scaler is None or not optimizers or not scaler.is_enabled():
        return 1.0
    scale = scaler.get_scale()
    for optimizer in optimizers:
        if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            scaler.unscale_(optimizer)
    return scale


def calling_scaler() -> GradScaler | None:
    """The scaler whose ``step`` is running: it calls ``optimizer.step()`` and tells nobody, and
    trainers have one of their own."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        if frame.f_code.co_name == "step":
            scaler = frame.f_locals.get("self")
            if isinstance(scaler, GradScaler):
                return scaler if scaler.is_enabled() else None
        frame = frame.f_back
    return None


def listed(optimizers: Any) -> list[Any]:
    """One optimizer, several, or none, each without what accelerate, Lightning and Fabric have put
    around it: hooks and scalers know the one inside."""
    if optimizers is None:
        return []
    given = list(optimizers) if isinstance(optimizers, list | tuple) else [optimizers]
    return [_bare(optimizer) for optimizer in given]


def _bare(optimizer: Any) -> Any:
    while any(base.__name__ in _WRAPPERS for base in type(optimizer).__mro__):
        optimizer = optimizer.optimizer
    return optimizer


_WRAPPERS = {"AcceleratedOptimizer", "LightningOptimizer", "_FabricOptimizer"}


def without_fabric(model: nn.Module) -> nn.Module:
    """What Fabric calls: the model, or the data-parallel wrapper that it has put around it."""
    while any(base.__name__ == "_FabricModule" for base in type(model).__mro__):
        model = model._forward_module  # type: ignore[assignment]
    return model
