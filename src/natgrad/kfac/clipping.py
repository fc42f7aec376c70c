"""How long a step may be: the KL clip, and the learning rates that it needs.

A step ``d`` changes the model's predictions by ``KL ~ 1/2 d^T F d``. With ``d = lr F^-1 grad`` that
is ``1/2 lr^2 <F^-1 grad, grad>``: the curvature need not be multiplied once more, an inner product
a block is enough. The step is a trust region in that metric (Pauloski 2022, eq. 16):

    nu = min(1, sqrt(kl_clip / sum_blocks reach^2 |<preconditioned, raw>|)),  reach = lr / (1 - m)

An optimizer with momentum ``m`` goes on along a gradient: ``lr d`` now, ``m lr d`` at the next
step, ``lr / (1 - m) d`` in all. The paper has ``lr`` alone. While gradients agree, as they do in
the first steps, weights then move ``1 / (1 - m)`` times as far as the clip allows: 100 times its KL
with 0.9, and a network without norm layers explodes. Its bound is ``kl_clip / (1 - m)^2`` here.

It is one number for the whole model, so that the clip changes the length of a step and never its
direction. The learning rate is the optimizer's, which has to be known for that.

With a damping that is a number the clip bounds weights, too: ``damping |d|^2 <= <d, (F + damping)
d> <= kl_clip``. That is what holds steps back where the scale of the loss is not known: multiplied
by a number ``c``, a loss has ``F`` times ``c^2`` and steps ``F^-1 grad`` times ``1/c``; and squares
of residuals ``r`` have an empirical Fisher of ``r^2`` times their Gauss-Newton matrix, so that
steps grow as ``1/r`` while the fit gets better (Kunstner et al. 2019). A damping that is relative
to ``F`` falls with it and holds nothing back. What ``lr`` means is then taken from the plain
gradient, for which it was chosen, layer by layer (`natgrad.kfac.stacks.unknown_scale`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_LEAST = 1e-3  # of 1 - m: nobody means a momentum of 1 to the letter
# What optimizers have that divide by the gradient's own size, or take its sign or polar factor.
_NORMALISING = {"eps", "betas", "etas", "ns_steps"}


class LearningRates:
    """How far the optimizer that holds a parameter goes along its gradient, now and by momentum:
    its learning rate, without momentum; 0 in none."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        self._parameters: list[list[int]] = []
        self._group: dict[int, int] = {}
        self._values: list[float] = []
        self.version = 0  # changes whenever a learning rate does
        # Whether any optimizer goes twice as far for twice the gradient: SGD, none of Adam's kind.
        self.keep_scale = False

    def read(self) -> None:
        """Look at the optimizers' groups, once a step."""
        if not self.optimizers:
            return
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        values = [_reach(group) for group in groups]
        self.keep_scale = any(map(_NORMALISING.isdisjoint, groups))
        # Other ones in a copy, after another optimizer has come, and where one was put in a group.
        parameters = [[id(p) for p in group["params"]] for group in groups]
        if self._parameters != parameters:
            self._parameters = parameters
            self._group = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        elif self._values == values:
            return
        self._values = values
        self.version += 1

    def of(self, parameter: nn.Parameter) -> float:
        """As of the last ``read``."""
        if not self.optimizers:
            return 1.0
        index = self._group.get(id(parameter))
        return 0.0 if index is None else self._values[index]


def _reach(group: Mapping[str, Any]) -> float:
    """``lr / (1 - m)``, or ``lr (1 - dampening) / (1 - m)`` as `torch.optim.SGD` has it, where the
    first step is ``lr`` all the same. What Adam and Muon keep is a mean, which goes no further."""
    rate, momentum = float(group["lr"]), float(group.get("momentum") or 0.0)
    if not momentum or "ns_steps" in group:  # Newton-Schulz: a Muon
        return rate
    kept = 1.0 - float(group.get("dampening", 0.0))
    return rate * max(1.0, kept / max(1.0 - momentum, _LEAST))


def kl_scale(total: Tensor, clip: float | None) -> Tensor:
    """``min(1, sqrt(clip / total))`` for ``total = sum reach^2 |<preconditioned, raw>|``.

    Pauloski 2022, eq. 16.

    0 where ``total`` is not finite: such a gradient must not reach the weights.
    """
    one = torch.ones_like(total)
    if clip is not None:
        bound = total.abs().clamp(min=torch.finfo(total.dtype).tiny)
        one = (clip / bound).sqrt().clamp(max=1.0)
    return torch.where(torch.isfinite(total), one, torch.zeros_like(one))
