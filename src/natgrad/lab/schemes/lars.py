"""LARS: SGD with a rate for each layer, ``λ = trust ‖w‖ / (‖g‖ + β ‖w‖)`` (You et al. 2017)."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from natgrad.checks import FRACTION
from natgrad.lab.schemes.norms import norm
from natgrad.lab.schemes.trust_ratio import LayerWise, trust_ratio


class LARS(LayerWise):
    """``v ← m v + lr λ (g + β w)``, ``w ← w - v``, with ``λ = trust ‖w‖ / (‖g‖ + β ‖w‖)``.

    The rate stands inside of the average, as in the paper, so a change of it acts on new gradients
    only. `parameter_groups` makes a group without layer-wise rate of biases and norm layers.

    Arguments:
        params: parameters, or groups of them, such as `parameter_groups` gives.
        lr: ``≥ 0``, the learning rate.
        momentum: ``m``, from 0 up to but not 1.
        weight_decay: ``β ≥ 0``, which also enters ``λ``.
        trust: ``> 0``, what each layer's rate is multiplied by; ``None`` is ``λ = 1``, plain SGD.
    """

    ranges: ClassVar = {**LayerWise.ranges, "momentum": FRACTION}

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
