"""Hooks of modules that are watched at the one function that they call on their weight."""

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from natgrad.capture.bare_uses import mark_output
from natgrad.capture.inner_uses import passes_over
from natgrad.layers import Layer
from natgrad.layers.axes import is_alone
from natgrad.layers.called import row_scales, weight_of

if TYPE_CHECKING:
    from natgrad.capture.hooks import Capture
    from natgrad.capture.tensor_hooks import Use, View


class FunctionHooks(TorchFunctionMode):
    """A function mode that is on while a module's forward runs, and reports its call."""

    def __init__(self, capture: "Capture", uses: list["Use"]) -> None:
        super().__init__()
        self.capture, self.uses = capture, uses
        self.entered: list[ExitStack] = []

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        while self.entered:  # a KeyboardInterrupt runs no hook, so the last call did not leave
            self.entered.pop().close()
        self.entered.append(ExitStack())
        self.entered[-1].enter_context(self)

    def leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if self.entered:  # not if another hook failed before the mode was entered
            self.entered.pop().close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for block, layer in self.uses:
            if layer.call.function is func:
                x = args[0] if args else kwargs["input"]
                self._seen((block, layer), x, out, weight_of(func, args, kwargs))
        return out

    def _seen(self, use: "Use", x: Any, out: Any, weight: Any) -> None:
        capture, (block, layer) = self.capture, use
        mark_output(out)
        if passes_over(capture, use, out):
            return
        alone = is_alone(x, layer.input_features)
        if not capture.count_call(block, layer.count(x), alone=alone):
            return
        if torch.is_grad_enabled() and out.requires_grad:
            block, layer = use = capture.facing(use, x)
            view: View = layer.arrange
            if layer.call.rows != "as they are":
                view = _Scaled(layer, weight)
            capture.watch_gradient(use, layer.keep((x,), {}, out), out, view)


class _Scaled:
    """The gradient of a function's output -> that of the rows of the parameter."""

    def __init__(self, layer: Layer[Any], weight: Tensor) -> None:
        centred = layer.call.rows == "scaled and centred"
        # FSDP has another tensor there meanwhile than the layer's own.
        source = layer.module.get_parameter(layer.call.source)
        scales = row_scales(weight, source, centred=centred)
        self.layer, self.features = layer, layer.output_features or 1
        self.scales = scales.view(-1, *[1] * (self.features - 1))

    def __call__(self, g: Tensor) -> Tensor:
        return self.layer.arrange(g * self.scales.to(g.dtype))
