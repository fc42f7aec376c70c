"""Hooks on tensors: on a layer's output, where its gradient meets its input, and on the model's."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from natgrad.capture.backwards import reaches
from natgrad.capture.blocks import Block
from natgrad.capture.passes import Pass
from natgrad.layers import Layer

if TYPE_CHECKING:
    from natgrad.capture.hooks import Capture

# Models through which vectors of a Fisher are sent back at this moment: these are no gradients of
# their losses, and no other preconditioner of the same model may take them for that.
observed: set[nn.Module] = set()

Use = tuple[Block, Layer[Any]]
View = Callable[[Tensor], Tensor]


class GradientHook:
    """The hook on an output tensor."""

    def __init__(self, capture: "Capture", use: Use, x: Any, this: Pass, view: View) -> None:
        self.capture, self.use, self.x, self.this, self.view = capture, use, x, this, view
        self.kept: Tensor | None = None  # the gradients until now, of a graph that is retained

    def __call__(self, g: Tensor) -> None:
        if self.capture.root in observed:
            return
        if torch.is_grad_enabled():  # create_graph=True: the gradient of the loss comes later
            self.capture.skipped = True
            if g.requires_grad:
                g.register_hook(self.second_order)
            return
        if not reaches(self.use[0].parameters):
            return
        g = self.view(g.detach())
        self.this.rows = max(self.this.rows, len(g))
        self.capture.mark_returned(self.this)
        self.kept = g if self.kept is None else self.kept + g
        if torch._C._autograd._get_current_graph_task_keep_graph():
            self.capture.waiting[self] = None
            return
        self.finish()
        self.x = None  # as autograd does, so that activations are freed on the way back

    def finish(self) -> None:
        g, self.kept = self.kept, None
        self.capture.waiting.pop(self, None)
        if g is not None:
            self.capture.on_pair(self.use, self.x, g, self.this)

    def second_order(self, g: Tensor) -> None:
        """The loss depends on this gradient."""
        if not torch.is_grad_enabled():
            layer = self.use[1]
            self.capture.second_order = f"{layer.kind} {layer.name!r}"


class OutputHook:
    """The hook on the model's own output, before the backward pass goes on into the model."""

    def __init__(self, capture: "Capture", this: Pass) -> None:
        self.capture, self.this = capture, this

    def __call__(self, g: Tensor) -> None:
        capture = self.capture
        if torch.is_grad_enabled() or capture.root in observed:
            return
        capture.backwards.arrived()
        if capture.counts_at_output():
            capture.mark_returned(self.this)
        capture.current = self.this  # what is recomputed from here on belongs to it

    def predicts(self, g: Tensor) -> None:  # on what the loss is computed from
        if torch.is_grad_enabled() or not self.capture.counts_at_output():
            return
        found = self.capture.outputs.pop(self.this, None)
        if found is not None and self.this.tape and self.capture.on_output is not None:
            self.capture.on_output(self.this, *found)
