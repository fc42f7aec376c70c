"""Whether the arguments of a preconditioner are what they must be, said when they are given.

A wrong argument would otherwise fail in a hook, many steps later, or on one rank only. Each message
names the argument, the value, what is allowed and what to pass instead.
"""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler

from natgrad.capture.discovery import StructureOf
from natgrad.checks import check_whole
from natgrad.curvature.fisher import Fisher
from natgrad.errors import SettingError
from natgrad.geometry import Geometry
from natgrad.inverses import Inverse
from natgrad.kfac.motion import Motion
from natgrad.kfac.ranks.distributed import Distributed, Group
from natgrad.layers import Layer, SharedInput
from natgrad.lengths import Length
from natgrad.loss_scale import MeanLoss, SumLoss
from natgrad.structures import Identity, Kronecker, Structure, UnitWise


def check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise SettingError(
            f"model is a {type(model).__name__} but must be a torch.nn.Module: pass the network."
        )


def check_optimizers(
    model: nn.Module, optimizers: Sequence[Any], kl_clip: Any, scaler: Any
) -> None:
    """When they are given, and when others take their place."""
    for optimizer in optimizers:
        if not hasattr(optimizer, "param_groups"):
            raise SettingError(
                f"optimizer is a {type(optimizer).__name__} but must be a torch.optim.Optimizer, a "
                "list of them, or None: pass the optimizer whose step() follows."
            )
    if not optimizers and kl_clip is not None:
        raise SettingError(
            f"kl_clip={kl_clip!r} needs the learning rate, and there is no optimizer to ask: pass "
            "KFAC(model, optimizer), or kl_clip=None."
        )
    if not optimizers and scaler is not None:
        raise SettingError(
            "scaler needs the optimizer whose gradients it unscales: pass KFAC(model, optimizer, "
            "scaler=scaler)."
        )
    if optimizers and kl_clip is not None:
        held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        own = {id(p) for p in model.parameters()}
        if own and held.isdisjoint(own):
            names = ", ".join(type(o).__name__ for o in optimizers)
            raise SettingError(
                f"optimizer ({names}) has none of the parameters of "
                f"{type(model).__name__}, so that kl_clip={kl_clip!r} would have no learning rate: "
                "pass the optimizer of this very model, or kl_clip=None."
            )


def check_choices(curvature: Any, structure: Any, inverse: Any) -> None:
    """Each is an object; a class, as in ``structure=EKFAC``, is a frequent mistake."""
    if curvature is not None and not isinstance(curvature, Fisher):
        raise SettingError(
            f"curvature is {curvature!r} but must be a Fisher: pass natgrad.EmpiricalFisher(), "
            "natgrad.MonteCarloFisher(), natgrad.ExactFisher() or natgrad.curvature.GaussNewton()."
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


def structure_of(given: StructureOf, motion: Motion, curvature: Fisher) -> StructureOf:
    """What is kept where the user has not said it: nothing if no curvature is used, and what takes
    gradients inside of the loss if these are looked at. ``None`` is the usual default."""
    if given is not None:
        return given
    if not motion.uses_curvature:
        return Identity()
    return _whole if curvature.of_residuals else None


def _whole(layer: Layer[Any]) -> Structure:
    return Kronecker(sharing="traces") if isinstance(layer, SharedInput) else UnitWise()


def check_max_dim(max_dim: Any) -> None:
    if max_dim is not None:
        check_whole(max_dim, "max_dim", low=1)


def check_motion(geometry: Any, length: Any, inverse: Inverse) -> None:
    if not isinstance(geometry, Geometry):
        raise SettingError(
            f"geometry is {geometry!r} but must be a geometry: pass an object such as "
            "natgrad.Spectral() or natgrad.Euclidean()."
        )
    if length is not None and not isinstance(length, Length):
        raise SettingError(
            f"length is {length!r} but must be a length or None: pass natgrad.Rms(), "
            "natgrad.OutputChange(), natgrad.lengths.Graft() or natgrad.lengths.Dogleg(), or leave "
            "it out for the KL clip."
        )
    geometry.check(inverse)


def group_of(distributed: Any) -> Group:
    """The ranks that train together; all ranks if ``distributed`` is wrong, so that all raise."""
    return distributed.group if isinstance(distributed, Distributed) else None


def check_groups(loss: Any, distributed: Any) -> None:
    if loss is not None and not isinstance(loss, MeanLoss | SumLoss):
        raise SettingError(
            f"loss is {loss!r} but must say how the loss adds up its samples: pass "
            "natgrad.MeanLoss() or natgrad.SumLoss()."
        )
    if not isinstance(distributed, Distributed):
        placement = callable(distributed) and not isinstance(distributed, type)
        example = f"Distributed(placement={distributed!r})" if placement else "Distributed()"
        raise SettingError(
            f"distributed is {distributed!r} but must be a natgrad.Distributed: pass "
            f"natgrad.{example}."
        )


def regions(loss: MeanLoss | SumLoss, curvature: Fisher) -> dict[str, float]:
    """Terms of a region by pattern, as many as a term of a sample."""
    if curvature.of_residuals and (loss.reduction == "sum" or loss.terms_per_sample != 1):
        raise SettingError(
            f"loss={loss!r} says what residuals() says, too, with GaussNewton(): leave loss out, "
            "and pass residuals(..., weights=...) for other weights than those of means."
        )
    given = loss.regions if isinstance(loss, MeanLoss) else None
    if given and curvature.observes:
        raise SettingError(
            f"regions are counted in the backward pass of the loss, which {curvature!r} does not "
            "look at: leave them out, or pass natgrad.EmpiricalFisher()."
        )
    return {name: float(terms) / loss.terms_per_sample for name, terms in (given or {}).items()}


def check_tensors(factor_dtype: Any, half_products: Any, scaler: Any) -> None:
    dtype = isinstance(factor_dtype, torch.dtype) and factor_dtype.is_floating_point
    if factor_dtype is not None and not dtype:
        raise SettingError(
            f"factor_dtype is {factor_dtype!r} but must be a floating-point dtype or None: pass "
            "one such as torch.bfloat16."
        )
    if half_products is not None and not isinstance(half_products, bool):
        raise SettingError(
            f"half_products is {half_products!r} but must be True, False or None: pass None for "
            "16-bit products where the device gains by them."
        )
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise SettingError(
            f"scaler is a {type(scaler).__name__} but must be a torch.amp.GradScaler or None: pass "
            "the one that scales the loss."
        )


def check_samples(samples: Any) -> None:
    """What a user has passed to ``step()``.

    Arguments:
        samples: a number of them.
    """
    whole = isinstance(samples, Integral) and samples is not True and samples is not False
    if not whole or samples < 0:
        raise SettingError(
            f"step(samples=...) got {samples!r} but needs a whole number of samples, 0 or more: "
            "pass an int, or leave it out where the model was called with all of them."
        )
