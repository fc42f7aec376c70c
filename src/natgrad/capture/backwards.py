"""Which backward passes came to their end, and whether their gradients are still there.

Statistics are added while a backward pass runs. If it fails in the middle, or its gradients are set
to zero and the batch is done again, what was added must go as the gradients have gone: otherwise
samples would count twice, in a step whose gradient is that of the second pass alone.

Autograd calls back at the end of a pass that has not failed. That gradients were thrown away shows
in the gradients: they are not there, or zero. Zeros are looked for only where a gradient was
written to between two passes, so that an accelerator need not wait.
"""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from natgrad.capture.module_hooks import in_backward
from natgrad.comm.layouts import is_sharded

THROWN_AWAY = (
    "The gradients of a backward pass were set to zero before the step, or the pass has failed, so "
    "its statistics are left out as well. Call kfac.discard() where gradients are thrown away; "
    "keep them in .grad where they count."
)
RECOMPUTED = (
    "{} is in a checkpoint with use_reentrant=True, which makes a new graph in every backward "
    "pass. Vectors of a Fisher that is not the empirical one, and a second backward pass over one "
    "forward pass, cannot be counted there: pass use_reentrant=False to torch.utils.checkpoint."
)


def reaches(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether the backward pass that is running computes gradients of any of these: not if all are
    frozen, as a discriminator while its generator learns, nor if the gradient of an input alone is
    asked for."""
    return any(is_sharded(p) or _is_reached(p) for p in parameters)


def _is_reached(p: nn.Parameter) -> bool:
    if not p.requires_grad:
        return False
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(p).node)
    except RuntimeError:  # autograd.grad(loss, p): its gradient is taken by hand
        return True


def by_hand(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether the backward pass that is running returns the gradient of one of these, as
    ``torch.autograd.grad(loss, p)`` does, instead of adding it to ``.grad``."""
    for p in parameters:
        if not p.requires_grad:  # frozen since its block was made, and without any edge
            continue
        try:
            torch._C._will_engine_execute_node(get_gradient_edge(p).node)
        except RuntimeError:
            return True
    return False


class Backwards:
    """Of the time since the last step. ``parameters``: those whose gradients tell."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self.failed = False
        self.running: set[int] = set()
        self._before: tuple[nn.Parameter, Tensor, int] | None = None

    def forget(self) -> None:
        self.failed, self.running, self._before = False, set(), None

    def first(self) -> None:
        """The pass that is running is the first that counts: what others left is not its own."""
        self._before = None

    def arrived(self) -> None:
        """A gradient has come back, in a backward pass that may be a new one."""
        task = torch._C._current_graph_task_id()
        if task != -1 and task not in self.running:
            self.running.add(task)
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(partial(self._ended, task))

    def outside(self) -> None:
        """Something happens that is no part of a backward pass: none can be running."""
        if self.running and not in_backward():
            self.failed = True
            self.running.clear()

    def thrown_away(self) -> bool:
        """Whether the gradients of all passes before are gone."""
        if not self.failed:
            if self._before is None:
                return False
            p, gradient, version = self._before
            if p.grad is gradient and gradient._version == version:
                return False
        return all(p.grad is None or not bool(p.grad.any()) for p in self.parameters)

    def _ended(self, task: int) -> None:
        self.running.discard(task)
        if not self.running:
            having = (p for p in self.parameters if p.grad is not None)
            if (p := next(having, None)) is not None:
                assert p.grad is not None
                self._before = (p, p.grad, p.grad._version)
