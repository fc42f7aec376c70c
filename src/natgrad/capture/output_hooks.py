"""Hooks on the model's own output: which passes count, and what the loss is a mean or sum of."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from natgrad.comm.layouts import full_tensor
from natgrad.curvature import loss_weights
from natgrad.curvature.loss_weights import READINGS, Seen

if TYPE_CHECKING:
    from natgrad.capture.hooks import Capture
    from natgrad.capture.passes import Pass

# Models through which vectors of a Fisher are sent back at this moment: these are no gradients of
# their losses, and no other preconditioner of the same model may take them for that.
observed: set[nn.Module] = set()


def on_gradient(t: Tensor, call: Callable[[Tensor], None]) -> None:
    """Have the gradient of an output told, or that of what it was cast from: trainers return logits
    in float32 of a model that has computed its loss from those in 16 bits."""
    node, index = t.grad_fn, t.output_nr
    while node is not None and node.name() == "ToCopyBackward0":
        node, index = node.next_functions[0]
    if node is None or node is t.grad_fn:
        t.register_hook(call)
    else:
        node.register_prehook(_OfOutput(call, index))


class _OfOutput:
    """A node's gradients -> that of one of its outputs."""

    def __init__(self, call: Callable[[Tensor], None], index: int) -> None:
        self.call, self.index = call, index

    def __call__(self, gradients: Sequence[Tensor | None]) -> None:
        if (g := gradients[self.index]) is not None:
            self.call(g)


class OutputHook:
    """The hook on the model's own output, before the backward pass goes on into the model."""

    def __init__(self, capture: "Capture", this: "Pass") -> None:
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


class WeightsHook:
    """Reads the weights of the loss's terms from the gradient of what it is computed from.

    ``z`` is held until the backward pass begins, as the loss itself does or its caller."""

    def __init__(
        self, root: nn.Module, this: "Pass", z: Tensor, readings: tuple[str, ...] = READINGS
    ) -> None:
        self.root, self.this, self.readings = root, this, readings
        self.z: Tensor | None = z.detach()
        self.version = z._version

    def __call__(self, g: Tensor) -> None:
        if torch.is_grad_enabled() or self.root in observed:
            return  # create_graph=True: the gradient of the loss comes later
        z, self.z = self.z, None
        if z is None or z._version != self.version:  # a second loss, or the output was overwritten
            self.this.weights = None
            return
        self.this.settle()
        if self.this.is_alone:
            z, g = z.unsqueeze(0), g.unsqueeze(0)
        self.this.weights = Reading(full_tensor(z), full_tensor(g), self.readings)


class Reading:
    """Numbers of one output, on their way to the host while the backward pass goes on."""

    def __init__(self, z: Tensor, g: Tensor, readings: tuple[str, ...]) -> None:
        self.shape = z.shape
        self.limit = loss_weights.tolerance(z.dtype, g.dtype)
        self.names, numbers = loss_weights.numbers_of(z, g, readings)
        self.event: torch.cuda.Event | None = None
        self.found: Seen | None = None
        if numbers.is_cuda:
            there = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            numbers = there.copy_(numbers, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()
        elif numbers.is_cpu:  # nobody waits for a number there, and nothing is kept
            self.found = self._read(numbers)
            return
        self.numbers = numbers

    def seen(self) -> Seen:
        """Waits for what was computed before the backward pass went into the model, no longer."""
        if self.event is not None:
            self.event.synchronize()
        self.found = self._read(self.numbers)
        return self.found

    def _read(self, numbers: Tensor) -> Seen:
        return loss_weights.seen(self.names, numbers.double().tolist(), self.shape, self.limit)
