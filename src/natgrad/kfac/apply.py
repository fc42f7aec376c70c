"""The apply clock: preconditioning all gradients, clipping the step, and keeping bad numbers out.

    grad <- nu (F + damping I)^-1 grad,    nu = min(1, sqrt(kl_clip / sum reach^2 |<new, old>|))

Gradients come to the ranks that precondition them (`Gradients`), are preconditioned stack by stack
(`Stack`), and go back. Then all of them are multiplied by one number for the whole model: the KL
clip ``nu``, which keeps the direction, or 0 where anything is not finite. A bad batch then moves no
weight on any rank; zeroing only the bad layers would be a step in a direction that nobody computed.
(If the scale of the loss is not known, each layer's step got a length of its own before.)

What a step needs and no step changes (stacks, views, lists of parameters) is prepared when a
further block becomes ready.
"""

import torch
from torch import Tensor, nn

from natgrad.capture.blocks import Block
from natgrad.damping import Damping
from natgrad.errors import CaptureError
from natgrad.inverses import Function
from natgrad.kfac.clipping import LearningRates, kl_scale
from natgrad.kfac.low_rank import LowRankGradients, OuterProduct
from natgrad.kfac.prediction import QuadraticModel
from natgrad.kfac.ranks.gradients import Gradients
from natgrad.kfac.ranks.team import Team
from natgrad.kfac.settings import KFACSettings
from natgrad.kfac.stacks import How, Stack, stacked
from natgrad.kfac.step import Step
from natgrad.linalg.workspace import allow
from natgrad.schedules import LevenbergMarquardt

LOOKS = 6  # refreshes whose steps are looked at, for `natgrad.kfac.health`


class Preconditioning:
    """Stacks are made anew whenever a further block has become ready."""

    def __init__(
        self,
        team: Team,
        gradients: Gradients,
        settings: KFACSettings,
        rates: LearningRates,
        low_rank: LowRankGradients,
        prediction: QuadraticModel,
    ) -> None:
        self.team, self.gradients, self.settings = team, gradients, settings
        self.motion, self._plain = team.motion, team.motion.is_plain
        self.rates, self.low_rank, self.prediction = rates, low_rank, prediction
        self.zeroed = 0  # steps whose gradient was not finite
        self._factor: Tensor | None = None  # what the last step was multiplied by
        self.stacks: list[Stack] = []
        self.buffers: list[Tensor] = []
        self.ready: list[Block] = []  # on all ranks together
        self._all_ready = False
        self._versions: list[int] = []
        self.refreshes, self.looks_left, self.looks = 0, LOOKS, False
        self._covered: list[nn.Parameter] = []  # of blocks that are ready, each once
        self._uncovered = gradients.parameters

    def __call__(self, step: Step) -> None:
        self._prepare()
        scale = self._collect(step)
        # Of a step that is no multiple of the gradient, or follows a mean of many, the gradient
        # itself must be of the mean loss; or of the loss as written, if that says how long it is.
        before, scale = (1.0, scale) if self._plain else (scale, 1.0)
        if self.motion.length is not None and self.motion.length.of_gradient:
            before = 1.0
        dots = torch.zeros(len(self.team.blocks), dtype=self.team.dtype, device=self.team.device)
        unknown = step.values.of_unknown_scale and self.motion.length is None
        # The length of a product that is not multiplied out is not known.
        thin = self.low_rank.found and not unknown
        outers = self._outers(step.loss_scale) if thin else {}
        complete = self._precondition(step, before, outers, dots, unknown)
        self.gradients.give_back(dots)
        owned, others = self._divide(outers, complete)
        finite = self.gradients.finite(others)  # asks all ranks, so before any leaves
        if not owned and not outers and not others:
            return
        clip = step.values.kl_clip if self.motion.length is None else None
        factor = kl_scale(dots.sum() * scale**2, clip) * scale
        self._factor = factor = torch.where(finite, factor, torch.zeros_like(factor))
        self._scale(factor, owned, others, outers)

    def take_over(self, other: "Preconditioning") -> None:
        """Go on from one with other blocks, which has taken the last step: the optimizer's step on
        what that has left may still come."""
        self.zeroed, self._factor = other.zeroed, other._factor
        self.refreshes, self.looks_left = other.refreshes, other.looks_left
        self.gradients.take_over(other.gradients)

    @property
    def moved(self) -> bool:
        """Whether the last step was one; otherwise something in it was not finite."""
        return self._factor is None or bool(self._factor != 0)

    @property
    def step_scale(self) -> float:
        """What the last step was multiplied by: 1 where the KL clip did not act."""
        return 1.0 if self._factor is None else float(self._factor)

    # Stacks.

    def _prepare(self) -> None:
        """What only changes when blocks become ready, or are refreshed."""
        if not self._all_ready:
            self.restack()
        self.looks = False
        if self._versions != (now := [block.version for block in self.ready]):
            self._versions = now
            self.refreshes += 1
            self.looks = self.looks_left > 0
            self.looks_left -= self.looks
            for stack in self.stacks:
                stack.check_versions()

    def restack(self) -> None:
        ready = [block for block in self.team.blocks.values() if block.ready]
        if len(ready) == len(self.ready):
            return
        self.ready, self._all_ready = ready, len(ready) == len(self.team.blocks)
        mine = [block for block in self.team.applies if block.ready]
        for block in mine:
            if block.lost:  # it would have the others of its stack preconditioned one by one
                block.leave_stack()
        here = [block for block in mine if not block.lost]
        self.stacks = stacked(here, self.team.order, self.motion)
        sizes: dict[tuple[torch.dtype, torch.device], int] = {}
        for stack in self.stacks:
            key = (stack.dtype, stack.device)
            sizes[key] = max(stack.numel, sizes.get(key, 0))
        room = {
            key: tuple(torch.empty(size, dtype=key[0], device=key[1]) for _ in range(2))
            for key, size in sizes.items()
        }
        for stack in self.stacks:
            stack.bind(*room[stack.dtype, stack.device])
        self.buffers = [buffer for both in room.values() for buffer in both]
        covered = {id(p): p for block in ready if not block.lost for p in block.parameters}
        self._covered = list(covered.values())
        self._uncovered = [p for p in self.gradients.parameters if id(p) not in covered]
        # Two products of a stack's gradients, at every step.
        allow(2 * max((s.numel * s.raw.element_size() for s in self.stacks), default=0))

    def invalidate(self) -> None:
        """The parts were replaced by others: begin without stacks."""
        self.stacks, self.buffers, self.ready, self._all_ready = [], [], [], False
        self._covered, self._uncovered = [], self.gradients.parameters

    # Stages of a step.

    def _collect(self, step: Step) -> float:
        """Bring gradients to the ranks that precondition them; returns what makes them those of the
        mean loss of a term."""
        samples = self.gradients.agree(step.samples, self.ready)
        weight = 1.0
        found = step.gradient_weight
        if self.gradients.are_local and self.settings.reduction == "mean":
            weight = (step.samples or 0) / samples if samples else 1.0 / self.team.size
        if found is not None:  # of the sum of all ranks, which DDP and FSDP have divided by them
            ranks = 1 if self.gradients.are_local else self.team.size
            scale = ranks / (found if self.team.alone else float(self.team.total([found])[0]))
        else:
            own = samples if self.gradients.are_local else step.samples
            scale = self._gradient_scale(own, step)
        rule = self.settings.damping
        if isinstance(rule, LevenbergMarquardt) and step.index % rule.every == 0:
            share = weight if self.gradients.are_local else 1.0 / self.team.size
            self.prediction.remember(scale, share)
        self.gradients.collect(weight)
        return scale

    def _gradient_scale(self, samples: int | None, step: Step) -> float:
        if self.settings.reduction == "mean":
            return 1.0
        # An empty batch has no samples, but was seen.
        if not samples and not step.passes and self.gradients.any_here():
            raise CaptureError(
                "SumLoss() needs the number of samples, but the model itself was not called since "
                "the last step. Call the model KFAC was given, or pass step(samples=...)."
            )
        return self.settings.gradient_scale(samples or 1)

    def _outers(self, loss_scale: float) -> dict[Block, OuterProduct]:
        return {
            block: outer
            for stack in self.stacks
            for block in stack.blocks
            if (outer := self.low_rank.take(block, loss_scale)) is not None
        }

    def _precondition(
        self,
        step: Step,
        scale: float,
        outers: dict[Block, OuterProduct],
        dots: Tensor,
        unknown: bool,
    ) -> bool:
        """Returns whether every block that is ready had its gradients."""
        complete = True
        functions: dict[Damping, Function | None] = {}
        dampings = step.values.dampings([stack.blocks[0] for stack in self.stacks])
        found = [self.gradients.of(stack.parameters) for stack in self.stacks]
        for stack, gradients, damping in zip(self.stacks, found, dampings, strict=True):
            if damping not in functions:
                function = self.motion.geometry.function(damping) if self._plain else None
                functions[damping] = function
            how = How(
                damping,
                step.values.momentum,
                scale,
                functions[damping],
                unknown,
                self.looks,
            )
            if outers and any(block in outers for block in stack.blocks):
                stack.precondition_apart(gradients, outers, how, self.rates, dots)
                complete = False
            else:
                complete &= stack.precondition(gradients, how, self.rates, dots)
        return complete and self.gradients.complete

    def _divide(
        self, outers: dict[Block, OuterProduct], complete: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients that were preconditioned, and all others, of parameters without a block, or
        with one that is not ready: this rank's local parts. Those in ``outers`` are neither yet."""
        if complete and not outers:
            return self.gradients.here(self._covered), self.gradients.here(self._uncovered)
        owned, later = (
            {id(p) for block in blocks for p in block.parameters}
            for blocks in (self.gradients.present, outers)
        )
        rest = [p for p in self.gradients.parameters if id(p) not in later]
        mine = [p for p in rest if id(p) in owned]
        others = [p for p in rest if id(p) not in owned]
        return self.gradients.here(mine), self.gradients.here(others)

    def _scale(
        self,
        factor: Tensor,
        owned: list[Tensor],
        others: list[Tensor],
        outers: dict[Block, OuterProduct],
    ) -> None:
        """Multiply all preconditioned gradients; 0 stands for a step that must not happen."""
        if factor.is_cpu:  # reading a number of the CPU waits for nothing
            value = float(factor)
            if value == 0.0:
                self.zeroed += 1
                raw = [p.grad for b in outers for p in b.parameters if p.grad is not None]
                torch._foreach_zero_([*owned, *others, *raw])
                return
            if value != 1.0 and owned:
                torch._foreach_mul_(owned, value)
            for outer in outers.values():
                outer.write(value)
            return
        for grad in (*owned, *others):
            torch.where(factor > 0, grad, torch.zeros_like(grad), out=grad)
        torch._foreach_mul_(owned, factor)
