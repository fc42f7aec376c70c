"""Models inside of wrappers, and compiled ones.

Hooks come and go with the steps, and compiled code does not look for them. So compiled modules run
eagerly on those steps that update the curvature, and compiled, without any hook, on all others.
"""

from typing import Any

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule

from natgrad.comm.layouts import AVERAGING


def unwrapped(model: nn.Module) -> nn.Module:
    """The module that computes, inside of ``torch.compile`` and data-parallel wrappers."""
    while True:
        if isinstance(model, OptimizedModule):
            model = model._orig_mod
        elif isinstance(model, (*AVERAGING, nn.DataParallel)):
            model = model.module  # type: ignore[assignment]
        else:
            return model


class Compiled:
    """All compiled modules in and around a model."""

    def __init__(self, model: nn.Module) -> None:
        self._all = list(model.modules())
        self._wrappers = [(m, m.forward) for m in self._all if isinstance(m, OptimizedModule)]
        self._modules: list[tuple[nn.Module, Any]] = []
        self.eager = False

    @property
    def found(self) -> bool:
        return bool(self._wrappers) or any(m._compiled_call_impl for m in self._all)

    def run_eagerly(self, wanted: bool) -> None:
        """Switch every compiled module over; what was compiled stays compiled for the next time."""
        if wanted == self.eager:
            return
        self.eager = wanted
        for wrapper, compiled in self._wrappers:
            wrapper.forward = wrapper._orig_mod.__call__ if wanted else compiled
        if wanted:
            self._modules = [(m, m._compiled_call_impl) for m in self._all if m._compiled_call_impl]
            for module, _ in self._modules:
                module._compiled_call_impl = None
        else:
            for module, compiled in self._modules:
                module._compiled_call_impl = compiled
            self._modules = []
