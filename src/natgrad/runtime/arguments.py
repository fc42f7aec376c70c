"""Whether the arguments of a preconditioner are what they must be, said when they are given."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler

from natgrad.curvature.fisher import Fisher
from natgrad.errors import SettingError
from natgrad.inverses import Inverse
from natgrad.runtime.ranges import POSITIVE, check_whole, number
from natgrad.runtime.settings import Settings
from natgrad.runtime.team import Wire
from natgrad.structures import Structure


def check_model(model: Any, optimizer: Any, kl_clip: Any) -> None:
    if not isinstance(model, nn.Module):
        raise SettingError(
            f"model is a {type(model).__name__} but must be a torch.nn.Module: pass the network."
        )
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise SettingError(
            f"optimizer is a {type(optimizer).__name__} but must be a torch.optim.Optimizer or "
            "None: pass the optimizer whose step() follows."
        )
    if optimizer is None and kl_clip is not None:
        raise SettingError(
            f"kl_clip={kl_clip!r} needs the learning rate, and there is no optimizer to ask: pass "
            "KFAC(model, optimizer), or kl_clip=None."
        )


def check_choices(curvature: Any, structure: Any, inverse: Any, placement: Any) -> None:
    """Each is an object; a class, as in ``structure=EKFAC``, is a frequent mistake."""
    if curvature is not None and not isinstance(curvature, Fisher):
        raise SettingError(
            f"curvature is {curvature!r} but must be a Fisher: pass natgrad.EmpiricalFisher(), "
            "natgrad.MonteCarloFisher() or natgrad.ExactFisher()."
        )
    if inverse is not None and not isinstance(inverse, Inverse):
        raise SettingError(
            f"inverse is {inverse!r} but must be an inverse: pass natgrad.Eigen() or "
            "natgrad.Cholesky()."
        )
    function = callable(structure) and not isinstance(structure, type)
    if structure is not None and not isinstance(structure, Structure) and not function:
        raise SettingError(
            f"structure is {structure!r} but must be a structure or a function of a layer: pass an "
            "object such as natgrad.Kronecker()."
        )

    if placement is not None and (not callable(placement) or isinstance(placement, type)):
        raise SettingError(
            f"placement is {placement!r} but must be a strategy: pass an object such as "
            "natgrad.CommOpt() or natgrad.Hybrid(0.5)."
        )


def regions(given: Any, settings: Settings, curvature: Fisher) -> dict[str, float]:
    """Terms of a region by pattern, as many as a term of a sample."""
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise SettingError(
            f"regions is {given!r} but must map patterns of modules to numbers: pass one such as "
            "{'roi_heads.*': 1}."
        )
    if given and settings.reduction == "sum":
        raise SettingError(
            "regions are counted for a loss that is a mean over them, but reduction is 'sum': "
            "leave one of the two out."
        )
    if given and curvature.observes:
        raise SettingError(
            f"regions are counted in the backward pass of the loss, which {curvature!r} does not "
            "look at: leave them out, or pass natgrad.EmpiricalFisher()."
        )
    each = settings.terms_per_sample
    return {n: number(v, f"regions[{n!r}]", POSITIVE) / each for n, v in given.items()}


def check_wire(wire_dtype: Any, wire: Any) -> None:
    allowed = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    if wire_dtype is not None and wire_dtype not in allowed:
        raise SettingError(
            f"wire_dtype is {wire_dtype!r} but must be None or one of "
            f"{', '.join(map(str, allowed))}: pass torch.bfloat16 for half the bytes."
        )
    if not isinstance(wire, Wire):
        raise SettingError(f"wire is {wire!r} but must be a natgrad.Wire: pass natgrad.Wire().")


def check_tensors(factor_dtype: Any, batch_axis: Any, scaler: Any, optimizer: Any) -> None:
    dtype = isinstance(factor_dtype, torch.dtype) and factor_dtype.is_floating_point
    if factor_dtype is not None and not dtype:
        raise SettingError(
            f"factor_dtype is {factor_dtype!r} but must be a floating-point dtype or None: pass "
            "one such as torch.bfloat16."
        )
    check_whole(batch_axis, "batch_axis", low=0)
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise SettingError(
            f"scaler is a {type(scaler).__name__} but must be a torch.amp.GradScaler or None: pass "
            "the one that scales the loss."
        )
    if scaler is not None and optimizer is None:
        raise SettingError(
            "scaler needs the optimizer whose gradients it unscales: pass KFAC(model, optimizer, "
            "scaler=scaler)."
        )
