"""Hooks of modules that call functions on their weights, such as attention and recurrent layers."""

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from natgrad.capture.bare_uses import mark_output
from natgrad.capture.inner_uses import passes_over
from natgrad.layers.functional import Projection

if TYPE_CHECKING:
    from natgrad.capture.hooks import Capture
    from natgrad.capture.tensor_hooks import Use, View


class ProjectionHooks:
    """Watches the projections in a module that calls functions on its weights."""

    def __init__(self, capture: "Capture", uses: list["Use"]) -> None:
        self.capture = capture
        self.blocks = {layer: block for block, layer in uses if isinstance(layer, Projection)}
        self.entered: list[ExitStack] = []

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        while self.entered:  # a KeyboardInterrupt runs no hook, so the last call did not leave
            self.entered.pop().close()
        layers = list(self.blocks)
        watch = layers[0].watch(layers, self.seen, (*args, *kwargs.values()))
        self.entered.append(ExitStack())
        self.entered[-1].enter_context(watch)

    def leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if self.entered:  # not if another hook failed before the mode was entered
            self.entered.pop().close()

    def seen(self, layer: Projection[Any], x: Any, out: Tensor, view: "View") -> None:
        capture, block = self.capture, self.blocks[layer]
        mark_output(out)
        if passes_over(capture, (block, layer), out):
            return
        rows = len(x) if isinstance(x, Tensor) else x.count
        counted = capture.count_call(block, rows)
        if rows == 1 and capture.current is not None:
            capture.current.lonely[block] = f"{layer.kind} {layer.name!r}"
        if counted and out.requires_grad and torch.is_grad_enabled():
            capture.watch_gradient((block, layer), x, out, view)
