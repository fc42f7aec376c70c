"""What a step does after the model or the optimizer has changed: blocks follow it, or say what
they left behind.

A block that has lost a parameter is passed over; the gradients of all parameters that are trained
now are averaged over plain ranks, whether they have a block or not, so that ranks stay alike.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from natgrad.capture.blocks import Block
from natgrad.capture.changes import ModelChanges
from natgrad.capture.hooks import Capture
from natgrad.capture.wrappers import listed
from natgrad.kfac.apply import Preconditioning
from natgrad.kfac.arguments import check_optimizers
from natgrad.kfac.attaching import Attachment
from natgrad.kfac.clipping import LearningRates
from natgrad.kfac.loss_finding import LossFinding
from natgrad.kfac.ranks.gradients import Gradients
from natgrad.kfac.ranks.team import Team
from natgrad.kfac.settings import KFACSettings


class FollowsOptimizer:
    """The optimizers of `natgrad.KFAC`, which may be others from some step on."""

    model: nn.Module
    settings: KFACSettings
    scaler: GradScaler | None
    team: Team
    rates: LearningRates
    attachment: Attachment | None
    finding: LossFinding

    def use_scaler(self, scaler: GradScaler) -> None:
        """The loss is scaled by this one from now on.

        Arguments:
            scaler: of the training loop.
        """
        self.scaler = self.finding.scaler = scaler

    @property
    def optimizer(self) -> Optimizer | tuple[Optimizer, ...] | None:
        """Whose ``step()`` follows, or all of them. Others may be put in their place."""
        found = self.rates.optimizers
        return found[0] if len(found) == 1 else (found or None)

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        optimizers: Sequence[Optimizer] = listed(optimizer)
        clip = None if self.team.motion.length else self.settings.kl_clip
        check_optimizers(self.model, optimizers, clip, self.scaler)
        self.rates.optimizers = tuple(optimizers)
        if self.attachment is not None:
            self.attachment.follow()


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
