"""Layer-wise rates, ``trust · ‖w‖ / ‖update‖``, and the groups of parameters that have none."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from natgrad.checks import NOT_NEGATIVE, POSITIVE, Range, number
from natgrad.errors import SettingError
from natgrad.lab.schemes.normalized import NORMS
from natgrad.lab.schemes.norms import safe_ratio


def trust_ratio(weight_norm: Tensor, update_norm: Tensor, trust: float) -> Tensor:
    """``trust · ‖w‖ / ‖update‖``, but 1 where one of the two is zero, which says nothing."""
    return safe_ratio(trust * weight_norm, update_norm, 1.0)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices, with ``weight_decay``; biases and all of norm layers, without, and with
    ``"trust": None``, which is no layer-wise rate of `LARS` and `LAMB`.

    Frozen parameters are in neither. Other optimizers take the groups as well.

    Arguments:
        model: whose trainable parameters are taken.
        weight_decay: ``≥ 0``, of the matrices.
    """
    number(weight_decay, "weight_decay", NOT_NEGATIVE)
    rest = [
        p
        for module in model.modules()
        for p in module.parameters(recurse=False)
        if isinstance(module, NORMS) or p.ndim < 2
    ]
    apart = set(rest)
    matrices = [p for p in model.parameters() if p.requires_grad and p not in apart]
    plain = [p for p in model.parameters() if p.requires_grad and p in apart]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0, "trust": None},
    ]
    return [group for group in groups if group["params"]]


class LayerWise(Optimizer):
    """One that steps parameter by parameter, with numbers of a group that lie in ``ranges``; a
    group whose ``trust`` is ``None`` has no layer-wise rate."""

    ranges: ClassVar[dict[str, Range]] = {
        "lr": NOT_NEGATIVE,
        "weight_decay": NOT_NEGATIVE,
        "trust": POSITIVE,
    }

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; numbers outside of their ranges raise `SettingError`.

        Arguments:
            param_group: a group as torch takes it, with ``params`` and what differs from the
                defaults.
        """
        super().add_param_group(param_group)
        index = len(self.param_groups) - 1
        name, group = type(self).__name__, self.param_groups[index]
        for key, allowed in self.ranges.items():
            if key != "trust" or group[key] is not None:
                number(group[key], f"{name}: '{key}' of parameter group {index}", allowed)

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Step every parameter that has a gradient. Returns what ``closure`` did.

        Arguments:
            closure: computes the loss anew, with gradients, and returns it; ``None`` steps by the
                gradients that are there.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, self._dense(p.grad), group)
        return loss

    def _dense(self, gradient: Tensor) -> Tensor:
        if gradient.is_sparse:
            raise SettingError(
                f"{type(self).__name__} was given a sparse gradient of shape "
                f"{list(gradient.shape)} but needs dense ones: make the embedding with "
                "sparse=False."
            )
        return gradient

    @abstractmethod
    def _update(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Change ``p`` by its dense ``gradient``, of the same shape."""
