"""What a step does after the model or the optimizer has changed: blocks follow it, or say what
they left behind.

A change is noticed in the forward pass of a step that updates, or by the step itself. Until there
are other blocks, those that have lost a parameter are passed over; the gradients of all parameters
that are trained now are averaged over plain ranks, whether they have a block or not, so that ranks
stay alike. Then blocks are made for what is trained and has none (`natgrad.kfac.assembling`):

    one process      at once, before anything of the step has come; otherwise at its end
    several ranks    at the end of the step in which all of them have said that they have changed
                     their models alike: with their gradients, or at the next update under DDP
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from natgrad.capture.blocks import Block
from natgrad.capture.changes import ModelChanges
from natgrad.capture.discovery import Choice, Uncovered, discover
from natgrad.capture.hooks import Capture
from natgrad.capture.wrappers import listed
from natgrad.comm.layouts import is_sharded
from natgrad.errors import CoverageError
from natgrad.kfac.apply import Preconditioning
from natgrad.kfac.arguments import check_optimizers
from natgrad.kfac.attaching import Attachment
from natgrad.kfac.clipping import LearningRates
from natgrad.kfac.loss_finding import LossFinding
from natgrad.kfac.ranks.gradients import Gradients
from natgrad.kfac.ranks.team import Team
from natgrad.kfac.settings import KFACSettings
from natgrad.layers.bare import Bare

Found = tuple[list[Block], dict[str, Uncovered]]


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
    """Called when the model has changed; ``found`` then has the blocks that it needs.

    ``pending``: the model has changed, and whether it needs other blocks was not looked at yet.
    ``choose`` gives the user's choice for the model as it is now; ``on_change`` is called first."""

    def __init__(self, model: nn.Module, blocks: list[Block], choice: Choice) -> None:
        self.model, self.choice = model, choice
        self.changes = ModelChanges(model, blocks)
        self.pending = False
        self.choose: Callable[[Choice], Choice] | None = None
        self.on_change: Callable[[], None] | None = None

    def __call__(
        self, capture: Capture, gradients: Gradients, preconditioning: Preconditioning
    ) -> None:
        """With the blocks that there are."""
        if self.on_change is not None:
            self.on_change()
        self.changes.follow()
        capture.rewire(self.changes.uses())
        gradients.follow(self.model.parameters())
        preconditioning.invalidate()
        self.pending = True
        team = gradients.team
        if not team.alone:
            team.digest = float(self.changes.digest())

    def found(self) -> tuple[Found | None, list[str]]:
        """The blocks that the model needs now, if these may be others than there are, and sentences
        for the user. On several ranks all have agreed that they have the same to do."""
        self.pending = False
        self.changes.settle()
        missing = self.changes.without_block()
        if not missing and not self.changes.gone():
            return None, []
        if any(is_sharded(p) for p in self.model.parameters()) and not all(
            is_sharded(p) for p in missing.values()
        ):
            why = "FSDP or tensor parallelism, which spread the others, do not know them"
            return None, [self.changes.cannot_be_made(missing, why)]
        choice = self.choice if self.choose is None else self.choose(self.choice)
        found, uncovered = discover(self.model, choice, again=True)
        blocks = self.changes.merged(found)
        problems = self.changes.problems(missing, uncovered)
        if all(isinstance(block.layers[0], Bare) for block in blocks):
            raise CoverageError(
                f"{type(self.model).__name__} has no layer any more that KFAC can precondition "
                f"({'; '.join(problems) or 'all of them are excluded'}): make a new KFAC, or leave "
                "its step() out."
            )
        if blocks == self.changes.blocks:
            self.changes.know(missing)
        return (blocks, uncovered), problems
