"""Preconditioning all gradients, clipping the step, and keeping bad numbers from the weights."""

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from natgrad.linalg.workspace import allow
from natgrad.runtime.blocks import Block
from natgrad.runtime.scaling import LearningRates, kl_scale
from natgrad.runtime.settings import Values
from natgrad.runtime.stacks import Stack, has_gradient, stacked
from natgrad.runtime.thin import Outer, ThinGradients


class Preconditioning:
    """Stacks are made anew whenever a further block has become ready."""

    def __init__(
        self,
        model: nn.Module,
        blocks: list[Block],
        optimizer: Optimizer | None,
        thin: ThinGradients,
    ) -> None:
        self.blocks, self.thin = blocks, thin
        self.rates = LearningRates(optimizer)
        self.stacks: list[Stack] = []
        self._stacked = -1
        self._parameters = list(model.parameters())
        self.zeroed = 0  # steps whose gradient was not finite

    def __call__(self, now: Values, gradient_scale: float, loss_scale: float) -> None:
        self.restack()
        outers = {
            block: outer
            for stack in self.stacks
            for block in stack.blocks
            if (outer := self.thin.take(block, loss_scale)) is not None
        }
        total: Tensor | None = None
        for stack in self.stacks:
            part = stack.precondition(now.damping_of(stack.blocks[0]), self.rates, outers)
            total = part if total is None else total + part.to(total.device, total.dtype)
        owned, others = self._gradients(outers)
        if total is None and not others:
            return
        if total is None:
            total = torch.zeros((), device=others[0].device)
        scale = kl_scale(total * gradient_scale**2, now.kl_clip) * gradient_scale
        for norm in torch._foreach_norm(others) if others else ():
            scale = torch.where(
                torch.isfinite(norm.to(scale.device)), scale, torch.zeros_like(scale)
            )
        self._scale(scale, owned, others, outers)

    def restack(self) -> None:
        if self._stacked != (ready := sum(block.ready for block in self.blocks)):
            self.stacks, self._stacked = stacked(self.blocks), ready
            # The gradients of a stack and two products of them, at every step.
            allow(3 * max((stack.size for stack in self.stacks), default=0))

    def invalidate(self) -> None:
        """The parts were replaced by others."""
        self._stacked = -1

    def _gradients(self, outers: dict[Block, Outer]) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients that were preconditioned, and all others: of parameters without a block, or
        with one that is not ready. Those in ``outers`` are neither yet."""
        owned, later = (
            {id(p) for block in blocks for p in block.parameters}
            for blocks in (
                [b for stack in self.stacks for b in stack.blocks if has_gradient(b)],
                outers,
            )
        )
        mine: list[Tensor] = []
        others: list[Tensor] = []
        for p in self._parameters:
            if p.grad is not None and id(p) not in later:
                # The values of a sparse gradient stand for it: 0 there is 0 everywhere.
                values = p.grad._values() if p.grad.is_sparse else p.grad
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
