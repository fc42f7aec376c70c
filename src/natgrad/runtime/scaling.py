"""How long a step may be: the KL clip, and damping that adapts to how well the model predicts."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from natgrad.runtime.ranges import NOT_NEGATIVE, POSITIVE, Range, check_numbers, check_whole


class LearningRates:
    """The learning rate that the optimizer has now for a parameter; 0 for one it does not have."""

    def __init__(self, optimizer: Optimizer | None) -> None:
        self.optimizer = optimizer
        self._group: dict[int, int] = {}
        self._groups = -1

    def __call__(self, parameter: nn.Parameter) -> float:
        if self.optimizer is None:
            return 1.0
        groups = self.optimizer.param_groups
        if len(groups) != self._groups:
            self._groups = len(groups)
            self._group = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        index = self._group.get(id(parameter))
        return 0.0 if index is None else float(groups[index]["lr"])


def kl_scale(total: Tensor, clip: float | None) -> Tensor:
    """``min(1, sqrt(clip / total))`` for ``total = sum lr^2 |<preconditioned, raw>|`` (P17).

    0 where ``total`` is not finite: such a gradient must not reach the weights.
    """
    one = torch.ones_like(total)
    if clip is not None:
        bound = total.abs().clamp(min=torch.finfo(total.dtype).tiny)
        one = (clip / bound).sqrt().clamp(max=1.0)
    return torch.where(torch.isfinite(total), one, torch.zeros_like(one))


@dataclass(frozen=True)
class LevenbergMarquardt:
    """Damping that follows how well the quadratic model predicts the loss (Martens & Grosse 2015).

    Every ``every`` steps pass the loss before and after the optimizer's step, on the same batch, to
    `KFAC.adapt`. With ``rho = (after - before) / predicted change``, the damping is multiplied by
    ``decay ** every`` where ``rho > 3/4`` and divided by it where ``rho < 1/4``.
    """

    start: float = 1e-3
    every: int = 5
    decay: float = 0.95
    low: float = 1e-8
    high: float = 1e2

    def __post_init__(self) -> None:
        check_numbers(
            self,
            start=POSITIVE,
            decay=Range(low=0, high=1, open_low=True, open_high=True),
            low=NOT_NEGATIVE,
            high=POSITIVE,
        )
        check_whole(self.every, "LevenbergMarquardt.every", low=1)

    def next(self, damping: float, ratio: float) -> float:
        """The damping after a step whose actual change was ``ratio`` times the predicted one."""
        factor = self.decay**self.every
        if ratio > 0.75:
            damping *= factor
        elif not ratio >= 0.25:  # also where the loss was not finite
            damping /= factor
        return min(max(damping, self.low), self.high)
