"""What a step does after the model has changed: blocks follow it, or say what they left behind.

A block that has lost a parameter is passed over; the gradients of all parameters that are trained
now are averaged over plain ranks, whether they have a block or not, so that ranks stay alike.
"""

from torch import nn

from natgrad.capture.blocks import Block
from natgrad.capture.changes import ModelChanges
from natgrad.capture.hooks import Capture
from natgrad.kfac.apply import Preconditioning
from natgrad.kfac.ranks.gradients import Gradients


class Following:
    """Called at the beginning of every step; returns sentences for the user."""

    def __init__(
        self,
        model: nn.Module,
        blocks: list[Block],
        capture: Capture,
        gradients: Gradients,
        preconditioning: Preconditioning,
    ) -> None:
        self.model, self.capture = model, capture
        self.gradients, self.preconditioning = gradients, preconditioning
        self.changes = ModelChanges(model, blocks)

    def __call__(self) -> list[str]:
        if not self.changes.found():
            return []
        problems = self.changes.follow()
        self.capture.rewire(self.changes.uses())
        self.gradients.follow(self.model.parameters())
        self.preconditioning.invalidate()
        return problems
