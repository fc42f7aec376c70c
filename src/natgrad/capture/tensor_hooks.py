"""The hook on a layer's output, where its gradient meets its input."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from natgrad.capture.backwards import reaches
from natgrad.capture.blocks import Block
from natgrad.capture.inner_uses import follow
from natgrad.capture.output_hooks import observed
from natgrad.capture.passes import Pass
from natgrad.layers import Layer

if TYPE_CHECKING:
    from natgrad.capture.hooks import Capture

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
            follow(self.capture, self.use, self.this, g, self.view)
            return
        if self.capture.aside is not None and self.capture.sets_aside():
            return
        if not reaches(self.use[0].parameters):
            return
        g = self.view(g.detach())
        self.this.widen(self.use[1], len(g))
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


class FollowingHook:
    """The hook on an output whose own gradient is asked for later: it looks only for uses of the
    weight in gradients."""

    def __init__(self, capture: "Capture", use: Use, this: Pass, view: View) -> None:
        self.capture, self.use, self.this, self.view = capture, use, this, view

    def __call__(self, g: Tensor) -> None:
        if torch.is_grad_enabled() and self.capture.root not in observed:
            follow(self.capture, self.use, self.this, g, self.view)
