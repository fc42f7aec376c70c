"""Whether a backward pass adds to gradients that K-FAC has preconditioned.

The next step would precondition them again. A version counter tells that a gradient was written to;
whether it was set to zero before, only a hook can tell, which is called before it is.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from natgrad.comm.layouts import is_sharded

if TYPE_CHECKING:
    from natgrad.kfac.attaching import Mark

ADDED = (
    "Gradients that K-FAC had preconditioned were still there as a backward pass added to them, so "
    "that the KL clip, which is over all optimizers, counts them again: call zero_grad() of all "
    "optimizers before each backward pass, not only of the one that steps."
)


class Watched:
    """Notices that a backward pass adds to the gradient of a mark, by a hook that is called before
    it does: later nobody can tell that from a gradient that was set to zero before."""

    def __init__(self, mark: "Mark") -> None:
        self.mark, self.added = mark, False
        p = mark.parameter
        hangs = p is not None and p.requires_grad and not is_sharded(p)
        self._handle = p.register_hook(self._arrives) if p is not None and hangs else None

    def _arrives(self, g: Tensor) -> None:
        p, left = self.mark.parameter, self.mark.gradient
        if p is not None and left is not None and p.grad is left:
            self.added |= left._version == self.mark.version or bool(left.any())

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
