"""Preconditioning all gradients, clipping the step, and keeping bad numbers from the weights."""

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from natgrad.runtime.blocks import Block
from natgrad.runtime.scaling import LearningRates, kl_scale
from natgrad.runtime.settings import Values
from natgrad.runtime.stacks import Stack, has_gradient, stacked


class Preconditioning:
    """Stacks are made anew whenever a further block has become ready."""

    def __init__(self, model: nn.Module, blocks: list[Block], optimizer: Optimizer | None) -> None:
        self.model, self.blocks = model, blocks
        self.rates = LearningRates(optimizer)
        self.stacks: list[Stack] = []
        self._stacked = -1
        covered = {id(p) for block in blocks for p in block.parameters}
        self._others = [p for p in model.parameters() if id(p) not in covered]
        self.zeroed = 0  # steps whose gradient was not finite

    def __call__(self, now: Values, gradient_scale: float) -> None:
        self.restack()
        total: Tensor | None = None
        for stack in self.stacks:
            damping = now.damping_of(stack.blocks[0])
            part = stack.precondition(damping, self.rates)
            total = part if total is None else total + part.to(total.device, total.dtype)
        if total is None:
            return
        scale = kl_scale(total * gradient_scale**2, now.kl_clip) * gradient_scale
        others = [p.grad for p in self._others if p.grad is not None]
        for norm in torch._foreach_norm(others) if others else ():
            scale = torch.where(
                torch.isfinite(norm.to(scale.device)), scale, torch.zeros_like(scale)
            )
        self._scale(scale)

    def restack(self) -> None:
        if self._stacked != (ready := sum(block.ready for block in self.blocks)):
            self.stacks, self._stacked = stacked(self.blocks), ready

    def invalidate(self) -> None:
        """The parts were replaced by others."""
        self._stacked = -1

    def _scale(self, scale: Tensor) -> None:
        """Multiply all preconditioned gradients; 0 stands for a step that must not happen."""
        owned = {
            id(p): p.grad
            for stack in self.stacks
            for block in stack.blocks
            if has_gradient(block)
            for p in block.parameters
            if p.grad is not None
        }
        grads = list(owned.values())
        if scale.is_cpu:  # reading a number of the CPU waits for nothing
            value = float(scale)
            if value == 0.0:
                self.zeroed += 1
                everything = [p.grad for p in self.model.parameters() if p.grad is not None]
                torch._foreach_zero_(everything)
            elif value != 1.0:
                torch._foreach_mul_(grads, value)
            return
        for grad in (*grads, *(p.grad for p in self._others if p.grad is not None)):
            torch.where(scale > 0, grad, torch.zeros_like(grad), out=grad)
        torch._foreach_mul_(grads, scale)
