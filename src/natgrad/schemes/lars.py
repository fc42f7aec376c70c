"""LARS: SGD with a rate for each layer, ``λ = trust ‖w‖ / (‖g‖ + β ‖w‖)`` (You et al., 2017)."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from natgrad.runtime.ranges import FRACTION, NOT_NEGATIVE, POSITIVE
from natgrad.schemes.norms import norm
from natgrad.schemes.trust import check_group, dense_gradient, trust_ratio


class LARS(Optimizer):
    """``v ← m v + lr λ (g + β w)``, ``w ← w - v``, with ``λ`` as above and weight decay ``β``.

    The rate stands inside of the average, as in the paper, so a change of it acts on new gradients
    only. A group with ``trust=None`` has ``λ = 1``; `parameter_groups` makes one of biases and norm
    layers.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float | None = 1e-3,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        check_group(
            self, lr=NOT_NEGATIVE, momentum=FRACTION, weight_decay=NOT_NEGATIVE, trust=POSITIVE
        )

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                gradient = dense_gradient(p, "LARS")
                if gradient is not None:
                    self._update(p, gradient, group)
        return loss

    def _update(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        decay = group["weight_decay"]
        change = gradient.add(p, alpha=decay).mul_(group["lr"])
        if group["trust"] is not None:
            size = norm(p)
            ratio = trust_ratio(size, norm(gradient) + decay * size, group["trust"])
            change = change.to(ratio.dtype) * ratio  # which may be too small for half precision
        if group["momentum"]:
            state = self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p)
            change = state["momentum_buffer"].mul_(group["momentum"]).add_(change)
        p.sub_(change)
