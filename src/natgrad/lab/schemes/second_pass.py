"""Two passes a step: the gradient at ``w``, then one at ``w + ε``, with ``ε`` made of the first."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from natgrad.errors import CaptureError, SettingError
from natgrad.lab.schemes.norms import safe_ratio


class SecondPass(ABC):
    """``with this.perturbed():`` around the second forward and backward pass.

    The weights are moved and the gradients of the first pass taken away on the way in; on the way
    out the weights are again what they were, to the bit, also after an error, and ``.grad`` is what
    is to be stepped with.

    Arguments:
        parameters: those to move; gradients of others are to be taken away by
            ``optimizer.zero_grad()`` inside of the block.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if not self.parameters or not all(isinstance(p, Tensor) for p in self.parameters):
            raise SettingError(
                f"{type(self).__name__} was given {len(self.parameters)} parameters, of which all "
                "must be tensors and one must be there: pass model.parameters()."
            )

    @abstractmethod
    def displacements(self, weights: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        """``ε``, a tensor for each weight, in its shape.

        Arguments:
            weights: those that have a gradient.
            gradients: of the first pass, one for each weight.
        """

    def combine(self, first: list[Tensor], second: list[Tensor], loss_scale: float) -> None:
        """Make the second gradients those to step with.

        Arguments:
            first: gradients of the first pass.
            second: gradients of the second pass, of the same parameters; changed in place.
            loss_scale: what both are too large by, as a ``GradScaler`` has scaled the loss.
        """
        return

    @contextmanager
    def perturbed(self, loss_scale: float = 1.0) -> Iterator[None]:
        """The context of the second pass; raises `CaptureError` without gradients of the first one
        on entry, or of the second one on exit.

        Arguments:
            loss_scale: ``scaler.get_scale()`` where a `torch.amp.GradScaler` scales the loss of
                both passes, else 1.
        """
        moved = [p for p in self.parameters if p.grad is not None]
        if not moved:
            raise CaptureError(
                f"{type(self).__name__} found no gradient to move the weights with: call "
                "loss.backward() once before perturbed()."
            )
        first = [p.grad for p in moved if p.grad is not None]
        with torch.no_grad():
            before = [p.detach().clone() for p in moved]
            for p, displacement in zip(moved, self.displacements(before, first), strict=True):
                p.add_(displacement)
        for p in self.parameters:
            p.grad = None
        try:
            yield
        finally:
            with torch.no_grad():
                for p, weight in zip(moved, before, strict=True):
                    p.copy_(weight)
        pairs = [(g, p.grad) for g, p in zip(first, moved, strict=True) if p.grad is not None]
        if not pairs:
            raise CaptureError(
                f"{type(self).__name__} found no gradient of the second pass: call "
                "loss.backward(), of a loss computed anew, inside of perturbed()."
            )
        with torch.no_grad():
            self.combine([one for one, _ in pairs], [other for _, other in pairs], loss_scale)


def scaled(directions: list[Tensor], length: float, size: Tensor) -> list[Tensor]:
    """``length · direction / size``; nothing where ``size`` is zero.

    In the precision of ``size``, as the factor may be too small for half precision."""
    factor = safe_ratio(torch.full_like(size, length), size, 0.0)
    return [factor.to(x.device) * x.to(factor.dtype) for x in directions]


@contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """A context that leaves the running averages of batch normalisation alone, in training mode
    too: for a second pass, forward and backward, over data that they have already seen.

    Arguments:
        model: whose batch and instance norms keep their running averages.
    """
    buffers = [
        buffer
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
        for buffer in module.buffers(recurse=False)
    ]
    saved = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(buffers, saved, strict=True):
                buffer.copy_(value)
