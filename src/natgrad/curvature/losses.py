"""The losses whose curvature is known, and `as_loss`, which recognises torch's own among them."""

import functools
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from natgrad.curvature.cross_entropy import CrossEntropy
from natgrad.curvature.elementwise import BinaryCrossEntropy, SquareLoss
from natgrad.curvature.loss import Loss
from natgrad.curvature.own_loss import OwnLoss
from natgrad.errors import SettingError

__all__ = ["BinaryCrossEntropy", "CrossEntropy", "Loss", "OwnLoss", "SquareLoss", "as_loss"]

# Function, the module that is the same loss, and the keywords they share.
_FUNCTIONS: tuple[tuple[object, type[nn.Module], set[str]], ...] = (
    (
        F.cross_entropy,
        nn.CrossEntropyLoss,
        {"weight", "ignore_index", "label_smoothing", "reduction"},
    ),
    (F.mse_loss, nn.MSELoss, {"reduction"}),
    (
        F.binary_cross_entropy_with_logits,
        nn.BCEWithLogitsLoss,
        {"weight", "pos_weight", "reduction"},
    ),
)


def as_loss(loss: Loss | Callable[[Tensor, Any], Tensor]) -> Loss:
    """The `Loss` that a loss function is.

    Arguments:
        loss: a `Loss`, which is returned as it is; torch's cross-entropy, square loss or binary
            cross-entropy with logits with ``reduction="mean"``, as a module, a function or a
            `functools.partial` of the function; or any function of (output, target) that gives the
            mean over the samples, which becomes an `OwnLoss`. A class raises.
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, type):
        raise SettingError(
            f"The loss is the class {loss.__name__} but must be one of its objects: pass "
            f"{loss.__name__}()."
        )
    if not callable(loss):
        raise SettingError(
            f"The loss is {loss!r} but must be a Loss, one of torch's losses, or a function of "
            "(output, target): pass for example natgrad.curvature.CrossEntropy()."
        )
    function: object = loss
    keywords: dict[str, Any] = {}
    if isinstance(loss, functools.partial) and not loss.args:
        function, keywords = loss.func, loss.keywords
    for known, module, shared in _FUNCTIONS:
        if function is known and shared >= keywords.keys():
            loss = module(**keywords)
    reduction = keywords.get("reduction", getattr(loss, "reduction", "mean"))
    if reduction != "mean":
        raise SettingError(
            f'The loss has reduction={reduction!r} but must be a mean: pass reduction="mean".'
        )
    # A class of the user's own that calculates something else has a forward of its own.
    forward = getattr(type(loss), "forward", None)
    if isinstance(loss, nn.CrossEntropyLoss) and forward is nn.CrossEntropyLoss.forward:
        return CrossEntropy(
            ignore_index=loss.ignore_index,
            class_weights=loss.weight,
            label_smoothing=loss.label_smoothing,
        )
    if isinstance(loss, nn.MSELoss) and forward is nn.MSELoss.forward:
        return SquareLoss()
    if isinstance(loss, nn.BCEWithLogitsLoss) and forward is nn.BCEWithLogitsLoss.forward:
        return BinaryCrossEntropy(pos_weight=loss.pos_weight, weight=loss.weight)
    return OwnLoss(loss)
