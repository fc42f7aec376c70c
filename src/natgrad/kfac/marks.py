"""Gradients as a step has left them, and what was done to them since.

K-FAC writes preconditioned gradients where plain ones were. If more is added to them before they
are zeroed, the next step would precondition them again. A version counter tells that a gradient was
written to; whether it was zeroed before, only a hook can tell, which is called before it is.
"""

from torch import Tensor, nn
from torch.optim import Optimizer

from natgrad.comm.layouts import is_sharded, local


class Mark:
    """The gradients of an optimizer as K-FAC has left them: the first one tells for all."""

    def __init__(self, optimizer: Optimizer) -> None:
        having = (p for g in optimizer.param_groups for p in g["params"] if p.grad is not None)
        self.parameter: nn.Parameter | None = next(having, None)
        self.gradient: Tensor | None = None if self.parameter is None else self.parameter.grad
        self.version = 0 if self.gradient is None else self.gradient._version
        self.weights = 0 if self.parameter is None else self.parameter._version

    @property
    def _there(self) -> bool:
        p = self.parameter
        return p is not None and p.grad is not None and p.grad is self.gradient

    @property
    def same(self) -> bool:
        return self._there and self.gradient is not None and self.gradient._version == self.version

    @property
    def changed(self) -> bool:
        return self._there and not self.same

    @property
    def added_to(self) -> bool:
        """As micro-batches do, whose gradients are added up before a step: the weight is still the
        same. (That of a sharded one does not say.)"""
        p = self.parameter
        return self.changed and p is not None and not is_sharded(p) and p._version == self.weights

    @property
    def waits(self) -> bool:
        """There was something to step on."""
        return self.gradient is not None and bool(local(self.gradient).any())


class Watched:
    """Notices that a backward pass adds to the gradient of a mark, by a hook that is called before
    it does: later nobody can tell that from a gradient that was set to zero before."""

    def __init__(self, mark: Mark) -> None:
        self.mark, self.added = mark, False
        p = mark.parameter
        hangs = p is not None and p.requires_grad and not is_sharded(p)
        self._handle = p.register_hook(self._arrives) if p is not None and hangs else None

    def _arrives(self, g: Tensor) -> None:
        mark, p = self.mark, self.mark.parameter
        if p is not None and p.grad is not None and p.grad is mark.gradient:
            self.added |= p.grad._version == mark.version or bool(p.grad.any())

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
