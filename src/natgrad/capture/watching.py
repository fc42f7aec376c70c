"""Which hooks each module gets: where its layers' inputs and outputs are to be seen.

called as a module                        a forward hook on it
calls one function on its weight          a function mode for its forward (`FunctionHooks`)
attention, recurrent layers               a function mode of their own (`ProjectionHooks`)
uses a parameter in an expression         stand-ins for its forward (`BareHooks`)
has experts in one parameter              a function mode, and stand-ins of others (`ExpertHooks`)
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from natgrad.capture.bare_uses import BareHooks, mark_output
from natgrad.capture.expert_uses import ExpertHooks
from natgrad.capture.function_hooks import FunctionHooks
from natgrad.capture.inner_uses import passes_over
from natgrad.capture.module_hooks import Registration
from natgrad.capture.projection_hooks import ProjectionHooks
from natgrad.layers.axes import is_alone
from natgrad.layers.bare import Bare
from natgrad.layers.experts import Expert
from natgrad.layers.functional import Projection

if TYPE_CHECKING:
    from natgrad.capture.hooks import Capture
    from natgrad.capture.tensor_hooks import Use

# Hooks that are entered before a module's forward, and left behind it.
Watch = FunctionHooks | ProjectionHooks | BareHooks | ExpertHooks


def watches_of(
    capture: "Capture", uses: Sequence["Use"]
) -> tuple[dict[nn.Module, Watch], list[Registration]]:
    """What watches each module from before its forward, and all hooks to register."""
    by_module: dict[nn.Module, list[Use]] = {}
    for use in [use for use in uses if use[0].factors]:
        by_module.setdefault(use[1].module, []).append(use)
    watches: dict[nn.Module, Watch] = {}
    watch: Watch | None
    wanted: list[Registration] = []
    for module, own in by_module.items():
        layer, watch = own[0][1], None
        if isinstance(layer, Bare | Expert):
            stacks = any(isinstance(one, Expert) for _, one in own)
            watch = ExpertHooks(capture, own) if stacks else BareHooks(capture, own)
        elif layer.call is not None:
            watch = FunctionHooks(capture, own)
        elif isinstance(layer, Projection):
            watch = ProjectionHooks(capture, own)
        if watch is not None:
            watches[module] = watch
            wanted += [
                (module.register_forward_pre_hook, watch.enter, {"with_kwargs": True}),
                # Also after an exception, or the mode would stay on for good.
                (module.register_forward_hook, watch.leave, {"always_call": True}),
            ]
            continue
        for use in own:
            how = {"prepend": True, "with_kwargs": True}
            wanted.append((module.register_forward_hook, _ForwardHook(capture, use), how))
    return watches, wanted


class _ForwardHook:
    """A layer's forward hook."""

    def __init__(self, capture: "Capture", use: "Use") -> None:
        self.capture, self.use = capture, use

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        capture, (block, layer) = self.capture, self.use
        mark_output(out)
        if passes_over(capture, self.use, out):
            return
        x = args[0] if args else next(iter(kwargs.values()))
        if not capture.count_call(block, layer.count(x), alone=is_alone(x, layer.input_features)):
            return
        if torch.is_grad_enabled() and out.requires_grad:
            use = capture.facing(self.use, x)
            capture.watch_gradient(use, use[1].keep(args, kwargs, out), out, use[1].arrange)
