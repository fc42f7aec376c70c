"""Targets that are distributions over classes: ``loss = -mean_n Σ_c y[n, c] log p[n, c]``."""

import torch
import torch.nn.functional as F
from torch import Tensor

from natgrad.checks import FRACTION, check_whole, number
from natgrad.errors import SettingError


def one_hot(labels: Tensor, classes: int, dtype: torch.dtype | None = None) -> Tensor:
    """Labels ``[n, …]`` as distributions ``[n, classes, …]``, where `F.cross_entropy` has them.

    Arguments:
        labels: ``[n, …]``, whole numbers from 0 to ``classes - 1``; others raise.
        classes: how many there are.
        dtype: of the result; ``None`` is torch's default.
    """
    check_whole(classes, "classes", low=1)
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise SettingError(
            f"labels are of dtype {labels.dtype} but must be whole numbers from 0 to "
            f"{classes - 1}: pass indices of classes."
        )
    dtype = dtype or torch.get_default_dtype()
    shape = (labels.shape[0], classes, *labels.shape[1:]) if labels.ndim else (classes,)
    found = torch.zeros(shape, dtype=dtype, device=labels.device)
    axis = 1 if labels.ndim else 0
    try:
        return found.scatter_(axis, labels.long().unsqueeze(axis), 1.0)
    except RuntimeError as error:
        raise SettingError(
            f"labels reach from {int(labels.min())} to {int(labels.max())} but must be from 0 to "
            f"{classes - 1}: pass classes={int(labels.max()) + 1}, or leave out what has no class."
        ) from error


def smooth(targets: Tensor, amount: float = 0.1, classes: int | None = None) -> Tensor:
    """``(1 - amount) y + amount / classes``: label smoothing (Pauloski 2022, sec. 6.3.1).

    Arguments:
        targets: distributions ``[n, classes, …]``, or labels ``[n, …]``.
        amount: share that all classes get alike, from 0 up to but not 1.
        classes: how many there are; must be given for labels.
    """
    number(amount, "amount", FRACTION)
    if not targets.is_floating_point():
        if classes is None:
            raise SettingError(
                f"targets of dtype {targets.dtype} are labels, which do not say how many classes "
                "there are: pass smooth(labels, amount, classes)."
            )
        targets = one_hot(targets, classes)
    check_distributions(targets, classes)
    return (1.0 - amount) * targets + amount / targets.shape[1]


def soft_cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """The mean over samples and positions of ``-Σ_c target log softmax(output)``, in float32 or
    better whatever these are in.

    Arguments:
        output: logits ``[n, classes, …]``.
        target: distributions of the same shape.
    """
    if output.shape != target.shape or output.ndim < 2:
        raise SettingError(
            f"output is of shape {list(output.shape)} and target of shape {list(target.shape)}, "
            "but both must be [n, classes, …]: make labels distributions with one_hot()."
        )
    dtype = torch.promote_types(torch.promote_types(output.dtype, target.dtype), torch.float32)
    return F.cross_entropy(output.to(dtype), target.to(dtype))


def check_distributions(targets: Tensor, classes: int | None) -> None:
    """Only their shape: to look at the numbers would make an accelerator wait."""
    if targets.ndim < 2 or (classes is not None and targets.shape[1] != classes):
        there = "classes" if classes is None else classes
        raise SettingError(
            f"Distributions over classes are of shape {list(targets.shape)} but must be "
            f"[n, {there}, …]: pass those, or labels as whole numbers."
        )
