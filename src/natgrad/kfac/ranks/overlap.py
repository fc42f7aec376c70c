"""Overlap of communication and computation: buckets of factors leave during the backward pass.

A bucket may leave when no gradient will come to its layers any more. That is known only where
something says that no other backward pass follows before the step, as DDP's ``no_sync`` and FSDP2's
``set_requires_gradient_sync`` do. Elsewhere buckets leave at the step.
"""

from collections.abc import Callable

from natgrad.capture.blocks import Block
from natgrad.capture.passes import Pass
from natgrad.kfac.ranks.reduction import Reducer


class Overlap:
    """Called when all gradients of a block in a pass have been added to its sums."""

    def __init__(
        self, reducer: Reducer, is_last: Callable[[], bool], scale: Callable[[], float]
    ) -> None:
        self.reducer, self.is_last, self.scale = reducer, is_last, scale

    def __call__(self, block: Block, this: Pass) -> None:
        if self.is_last():
            self.reducer.complete(block, this, self.scale())
