"""What a step does after the model or the optimizer has changed: blocks follow it, or say what
they left behind.

A block that has lost a parameter is passed over; the gradients of all parameters that are trained
now are averaged over plain ranks, whether they have a block or not, so that ranks stay alike.
"""

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from natgrad.capture.blocks import Block
from natgrad.capture.changes import ModelChanges
from natgrad.capture.hooks import Capture
from natgrad.kfac.apply import Preconditioning
from natgrad.kfac.arguments import check_optimizer
from natgrad.kfac.clipping import LearningRates
from natgrad.kfac.ranks.gradients import Gradients
from natgrad.kfac.ranks.team import Team
from natgrad.kfac.settings import KFACSettings


class FollowsOptimizer:
    """The optimizer of `natgrad.KFAC`, which may be another one from some step on."""

    model: nn.Module
    settings: KFACSettings
    scaler: GradScaler | None
    team: Team
    rates: LearningRates

    @property
    def optimizer(self) -> Optimizer | None:
        """Whose ``step()`` follows. Another one may be put in its place."""
        return self.rates.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Optimizer | None) -> None:
        clip = None if self.team.motion.length else self.settings.kl_clip
        check_optimizer(self.model, optimizer, clip, self.scaler)
        self.rates.optimizer = optimizer


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
