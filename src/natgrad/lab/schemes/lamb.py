"""LAMB: Adam with a length for each layer, ``w ← w - lr ‖w‖ u / ‖u‖`` (You et al. 2020)."""

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from natgrad.checks import FRACTION, NOT_NEGATIVE, number
from natgrad.errors import SettingError
from natgrad.lab.schemes.norms import norm
from natgrad.lab.schemes.trust_ratio import LayerWise, trust_ratio


class LAMB(LayerWise):
    """``u = m̂ / (√v̂ + ε) + λ w`` with Adam's bias-corrected averages ``m̂`` and ``v̂`` and weight
    decay ``λ``; then ``w ← w - lr · trust φ(‖w‖) / ‖u‖ · u``, ``φ(z) = min(max(z, low), high)``.

    `parameter_groups` makes a group without layer-wise rate of biases and norm layers.

    Arguments:
        params: parameters, or groups of them, such as `parameter_groups` gives.
        lr: ``≥ 0``, the learning rate.
        betas: shares of the past in the running averages ``m`` of gradients and ``v`` of their
            squares, from 0 up to but not 1.
        eps: ``ε ≥ 0``, added to ``√v̂``.
        weight_decay: ``λ ≥ 0``, as in AdamW.
        trust: ``> 0``, what each layer's rate is multiplied by; ``None`` has no layer-wise rate,
            which is AdamW.
        bounds: ``(low, high)`` with ``0 ≤ low < high``, between which ``‖w‖`` is brought before it
            enters the rate.
    """

    ranges: ClassVar = {**LayerWise.ranges, "eps": NOT_NEGATIVE}

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        trust: float | None = 1.0,
        bounds: tuple[float, float] = (0.0, math.inf),
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "trust": trust,
            "bounds": bounds,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group, index = self.param_groups[-1], len(self.param_groups) - 1
        for beta in group["betas"]:
            number(beta, f"LAMB: a beta of parameter group {index}", FRACTION)
        low, high = group["bounds"]
        if not 0 <= low < high:
            raise SettingError(
                f"LAMB: 'bounds' of parameter group {index} are {(low, high)!r} but must be two "
                "numbers with 0 <= low < high: pass (0, inf) for none."
            )

    def _update(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (beta, beta2) = self.state[p], group["betas"]
        if not state:
            state["step"] = torch.tensor(0.0)  # on the CPU, as torch's own: read without waiting
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
        state["step"] += 1
        step = float(state["step"])
        mean = state["exp_avg"].lerp_(gradient, 1 - beta)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        update = (mean / (1 - beta**step)).div_(root).add_(p, alpha=group["weight_decay"])
        if group["trust"] is not None:
            ratio = trust_ratio(norm(p).clamp(*group["bounds"]), norm(update), group["trust"])
            update = update.to(ratio.dtype) * ratio
        p.sub_(update.mul_(group["lr"]))
