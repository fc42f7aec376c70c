"""Layer-wise rates, ``trust · ‖w‖ / ‖update‖``, and the groups of parameters that have none."""

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from natgrad.errors import SettingError
from natgrad.runtime.ranges import NOT_NEGATIVE, Range, number
from natgrad.schemes.norms import safe_ratio

_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def trust_ratio(weight_norm: Tensor, update_norm: Tensor, trust: float) -> Tensor:
    """``trust · ‖w‖ / ‖update‖``, but 1 where one of the two is zero, which says nothing."""
    return safe_ratio(trust * weight_norm, update_norm, 1.0)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices, with ``weight_decay``; biases and all of norm layers, without, and with
    ``"trust": None``, which is no layer-wise rate of `LARS` and `LAMB`.

    Frozen parameters are in neither. Other optimizers take the groups as well.
    """
    number(weight_decay, "weight_decay", NOT_NEGATIVE)
    rest = [
        p
        for module in model.modules()
        for p in module.parameters(recurse=False)
        if isinstance(module, _NORMS) or p.ndim < 2
    ]
    apart = set(rest)
    matrices = [p for p in model.parameters() if p.requires_grad and p not in apart]
    plain = [p for p in model.parameters() if p.requires_grad and p in apart]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": plain, "weight_decay": 0.0, "trust": None},
    ]
    return [group for group in groups if group["params"]]


def check_group(optimizer: Optimizer, **ranges: Range) -> None:
    """The numbers of the group that was added last; those that are ``None`` are switched off."""
    index = len(optimizer.param_groups) - 1
    name, group = type(optimizer).__name__, optimizer.param_groups[index]
    for key, allowed in ranges.items():
        if key != "trust" or group[key] is not None:
            number(group[key], f"{name}: '{key}' of parameter group {index}", allowed)


def dense_gradient(parameter: Tensor, owner: str) -> Tensor | None:
    gradient = parameter.grad
    if gradient is not None and gradient.is_sparse:
        raise SettingError(
            f"{owner} was given a sparse gradient of shape {list(gradient.shape)} but needs dense "
            "ones: make the embedding with sparse=False."
        )
    return gradient
