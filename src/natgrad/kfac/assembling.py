"""What a preconditioner makes of its blocks, once, and again when the model has others.

Blocks that are as they were keep all that they know, and take it along: a new plan may give a
factor to other ranks than the one before. New blocks begin empty (`natgrad.kfac.newcomers`).
Clocks, settings, hooks on the model and what hangs on optimizers stay as they are.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler

from natgrad.capture.blocks import Block
from natgrad.capture.discovery import Uncovered
from natgrad.capture.hooks import Capture
from natgrad.capture.statistics import Statistics
from natgrad.capture.wrappers import Compiled
from natgrad.comm.agreement import AllRanksAgree
from natgrad.curvature.fisher import Fisher
from natgrad.errors import SettingError
from natgrad.kfac.apply import Preconditioning
from natgrad.kfac.arguments import check_optimizers
from natgrad.kfac.blending import Blending
from natgrad.kfac.clipping import LearningRates
from natgrad.kfac.following import Following
from natgrad.kfac.loss_finding import LossFinding
from natgrad.kfac.low_rank import LowRankGradients
from natgrad.kfac.newcomers import Newcomers
from natgrad.kfac.observation import Observation
from natgrad.kfac.prediction import QuadraticModel
from natgrad.kfac.ranks.agreement import blocks_to_compare
from natgrad.kfac.ranks.gradients import Gradients
from natgrad.kfac.ranks.overlap import Overlap
from natgrad.kfac.ranks.reduction import Reducer
from natgrad.kfac.ranks.team import Team
from natgrad.kfac.refresh import Refresh
from natgrad.kfac.state.checkpoint import Saveable, summary
from natgrad.kfac.state.entries import Entry, entries, gathered, saved, tensors_of_block
from natgrad.kfac.update import Update
from natgrad.lengths import Dogleg


class Assembling(Saveable):
    """The part of `natgrad.KFAC` that is made of its blocks."""

    model: nn.Module
    blocks: list[Block]
    uncovered: dict[str, Uncovered]
    curvature: Fisher
    scaler: GradScaler | None
    capture: Capture
    statistics: Statistics
    observation: Observation
    finding: LossFinding
    compiled: Compiled
    rates: LearningRates
    following: Following
    newcomers: Newcomers
    detached: bool
    _is_last: Callable[[], bool] | None  # DDP or FSDP says so of a backward pass

    def _assemble(self, team: Team) -> None:
        """The stages of a step, for the blocks of a team."""
        self.team, motion = team, team.motion
        self.reducer = Reducer(team)
        self._overlap()
        parts = (team, self.reducer, self.capture, self.statistics)
        self.updating = Update(*parts, self.curvature, self.update_clocks, self.finding)
        self.refreshing = Refresh(team, self.refresh_clocks, self.newcomers)
        # Hooks on every step would be traced into compiled code; other ranks have other batches.
        pays = team.alone and not self.compiled.found and motion.is_plain
        blends = motion.length if isinstance(motion.length, Dogleg) else None  # means of gradients
        self.low_rank = LowRankGradients(self.blocks, enabled=pays and blends is None)
        self.gradients = Gradients(team, self.model.parameters())
        self.prediction = QuadraticModel(team, self.model)
        self.preconditioning = Preconditioning(
            team, self.gradients, self.settings, self.rates, self.low_rank, self.prediction
        )

        self.blending = None if blends is None else Blending(self.preconditioning, blends)

    def _overlap(self) -> None:
        """Overlap communication with the backward pass, if DDP or FSDP says when it is the last."""
        if self._is_last is None or self.team.alone or self.team.units:
            return
        self.reducer.overlaps = True
        overlap = Overlap(self.reducer, self._is_last, self.finding.statistics_scale)
        # Several gradients are drawn for one output; all of them are there after observe().
        (self.observation if self.curvature.observes else self.statistics).on_complete = overlap

    def _may_join(self) -> bool:
        """Whether blocks can be made inside of a forward pass, for this very step."""
        ready = self.team.alone and self.capture.armed and torch.is_grad_enabled()
        return ready and not self.team.plan.world.sharded

    def _rebuild(self) -> list[str]:
        """Have the blocks that the model needs now, on all ranks together. Returns sentences for
        the user."""
        before, team = set(self.blocks), self.team
        team.agreed = False
        found, problems = self.following.found()
        if found is None:
            return problems
        blocks, self.uncovered = found
        if blocks == self.blocks:
            return problems
        with AllRanksAgree(self.comm) as agreed:
            motion = team.motion
            motion.check(blocks)
            clip = None if motion.length else self.settings.kl_clip
            check_optimizers(self.model, self.rates.optimizers, clip, self.scaler)
            agreed.compared = blocks_to_compare(self.model, blocks)
        state = None if team.alone else summary(self)
        self.low_rank.detach()
        stepped, predicted, blended = self.preconditioning, self.prediction, self.blending
        self.blocks = blocks
        for block in blocks:
            if block.shares_input_with not in blocks:
                block.share_input(None)
        self.compiled.follow()
        self._assemble(team.successor(blocks))
        if state is not None:
            _move([block for block in blocks if block in before], team, self.team, state)
        self.preconditioning.take_over(stepped)
        self.prediction.take_over(predicted)
        if self.blending is not None and blended is not None:
            self.blending.take_over(blended)
        self.following.changes.adopt(blocks)
        self.capture.follow(blocks, self.following.changes.uses())
        self.newcomers.follow(blocks)
        new = [block for block in blocks if block not in before]
        self.newcomers.welcome(new, self.steps, self.capture.passes)
        return [*problems, *self._not_stepped(new)]

    def _check_newcomers(self) -> None:
        """At a step that may be the first of some blocks."""
        if late := self.newcomers.late(self.capture.passes, self.steps):
            due = {b: names for b, names in self.statistics.due.items() if b not in late}
            self.statistics.due = self.reducer.due = due
        if self.newcomers.untried:
            self._check_averaged()

    def _check_averaged(self) -> None:
        """DDP averages what was trained when it was made, and leaves all else to each rank, which
        would then train a model of its own: all ranks refuse that, the first time they can see."""
        blocks, self.newcomers.untried = self.newcomers.untried, []
        world = self.team.plan.world
        if self.team.alone or world.gradients_are_local or world.sharded:
            return
        own = [p for block in blocks for p in block.parameters]
        norms = [0.0 if p.grad is None else float(p.grad.double().norm()) for p in own]
        sums = self.team.total([*norms, *(n * n for n in norms)]).view(2, -1).tolist()
        for p, total, squares in zip(own, *sums, strict=True):
            if squares * self.team.size - total**2 > 1e-12 * total**2:
                names = {id(q): name for name, q in self.model.named_parameters()}
                raise SettingError(
                    f"The gradient of {names.get(id(p), 'a new parameter')!r} is another one on "
                    "every rank, as DDP averages what was trained when it was made: put the "
                    "model into a new DistributedDataParallel after unfreezing, or freeze "
                    "after that, with find_unused_parameters=True."
                )

    def _not_stepped(self, blocks: list[Block]) -> list[str]:
        """What no optimizer will step, as torch's do not follow a model."""
        held = {id(p) for o in self.rates.optimizers for g in o.param_groups for p in g["params"]}
        if not held:
            return []
        names = {id(p): name for name, p in self.model.named_parameters()}
        left = [names[id(p)] for block in blocks for p in block.parameters if id(p) not in held]
        if not left:
            return []
        others = f" and {len(left) - 1} others are" if len(left) > 1 else " is"
        return [
            f"{left[0]!r}{others} trained, and in no group of the optimizer, which leaves them as "
            "they are: call optimizer.add_param_group(...), or put them into one of its groups."
        ]


def _move(kept: list[Block], old: Team, new: Team, state: dict[str, Any]) -> None:
    """What is known of these blocks, to the ranks that need it by the new plan: block by block, so
    that no rank has all of it."""
    need = {entry.key: entry for entry in entries(new)}
    have: dict[Block, list[Entry]] = {block: [] for block in kept}
    for entry in saved(state, old):
        if entry.block in have:
            have[entry.block].append(entry)
    for block, own in have.items():
        own = [entry for entry in own if entry.key in need]
        if all(tuple(entry.ranks) == tuple(need[entry.key].ranks) for entry in own):
            continue
        found = {
            need[entry.key]: tensor
            for entry, tensor in gathered(old, own)
            if new.rank in need[entry.key].ranks
        }
        block.restore(
            **tensors_of_block(block, found)._asdict(),
            solved=block.solved,
            counts=(int(block.dropped), block.failures),
            shares_input_with=block.shares_input_with,
        )
