"""Preconditioning all gradients, clipping the step, and keeping bad numbers from the weights."""

import torch
from torch import Tensor
from torch.optim import Optimizer

from natgrad.comm.layouts import local
from natgrad.linalg.workspace import allow
from natgrad.runtime.blocks import Block
from natgrad.runtime.gradients import Gradients
from natgrad.runtime.scaling import LearningRates, kl_scale
from natgrad.runtime.settings import Values
from natgrad.runtime.stacks import Stack, stacked
from natgrad.runtime.team import Team
from natgrad.runtime.thin import Outer, ThinGradients


class Preconditioning:
    """Stacks are made anew whenever a further block has become ready."""

    def __init__(
        self, team: Team, gradients: Gradients, optimizer: Optimizer | None, thin: ThinGradients
    ) -> None:
        self.team, self.gradients, self.thin = team, gradients, thin
        self.rates = LearningRates(optimizer)
        self.stacks: list[Stack] = []
        self._stacked = -1
        self.zeroed = 0  # steps whose gradient was not finite

    def __call__(
        self,
        now: Values,
        present: list[Block],
        gradient_scale: float,
        weight: float,
        loss_scale: float,
    ) -> None:
        """``present``: blocks with a gradient; ``weight``: of this rank's gradients in the mean of
        all, where they are still to be added up."""
        self.restack()
        self.gradients.collect(present, weight)
        outers = {
            block: outer
            for stack in self.stacks
            for block in stack.blocks
            if (outer := self.thin.take(block, loss_scale)) is not None
        }
        dots = self._dots()
        for stack in self.stacks:
            found = stack.precondition(
                now.damping_of(stack.blocks[0]),
                self.rates,
                outers,
                set(present),
                self.gradients.read,
            )
            for block, dot in found.items():
                dots[self.team.order[block]] = dot
        self.gradients.give_back(present, dots)
        owned, others = self._gradients(present, outers)
        finite = self.gradients.finite(others, present)  # asks all ranks, so before any leaves
        if not owned and not outers and not others:
            return
        scale = kl_scale(dots.sum() * gradient_scale**2, now.kl_clip) * gradient_scale
        scale = torch.where(finite, scale, torch.zeros_like(scale))
        self._scale(scale, owned, others, outers)

    def _dots(self) -> Tensor:
        """Zeros, one for each block, in the order of the blocks on all ranks."""
        team = self.team
        return torch.zeros(len(team.blocks), dtype=team.dtype, device=team.device)

    def restack(self) -> None:
        blocks = self.team.applies
        if self._stacked != (ready := sum(block.ready for block in blocks)):
            self.stacks, self._stacked = stacked(blocks), ready
            # The gradients of a stack and two products of them, at every step.
            allow(3 * max((stack.size for stack in self.stacks), default=0))

    def invalidate(self) -> None:
        """The parts were replaced by others."""
        self._stacked = -1

    def _gradients(
        self, present: list[Block], outers: dict[Block, Outer]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients that were preconditioned, and all others, of parameters without a block, or
        with one that is not ready: what of them is on this rank. Those in ``outers`` are neither
        yet."""
        owned, later = (
            {id(p) for block in blocks for p in block.parameters} for blocks in (present, outers)
        )
        mine: list[Tensor] = []
        others: list[Tensor] = []
        for p in self.gradients.parameters:
            if p.grad is not None and id(p) not in later:
                # The values of a sparse gradient stand for it: 0 there is 0 everywhere.
                values = p.grad._values() if p.grad.is_sparse else local(p.grad)
                (mine if id(p) in owned else others).append(values)
        return mine, others

    def _scale(
        self,
        scale: Tensor,
        owned: list[Tensor],
        others: list[Tensor],
        outers: dict[Block, Outer],
    ) -> None:
        """Multiply all preconditioned gradients; 0 stands for a step that must not happen."""
        if scale.is_cpu:  # reading a number of the CPU waits for nothing
            value = float(scale)
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
            torch.where(scale > 0, grad, torch.zeros_like(grad), out=grad)
        torch._foreach_mul_(owned, scale)
