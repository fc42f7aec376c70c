"""What a classifier gets wrong, and by how much it gets the rest right: ``f_y - max_{c≠y} f_c``."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from natgrad.curvature.losses import BinaryCrossEntropy, CrossEntropy, Loss, as_loss
from natgrad.errors import SettingError
from natgrad.operators import Problem

Error = Callable[[Tensor, Any], Tensor]


def margins(loss: Loss, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """``[n, positions]``, above zero where the answer is right, and whether the target counts.

    Arguments:
        loss: a `CrossEntropy`, which says where the classes are, or a `BinaryCrossEntropy`; others
            raise.
        output: logits ``[n, …]``.
        target: class indices, or class probabilities, of which the largest counts; for a binary
            cross-entropy probabilities, which count as 1 above ½.
    """
    if isinstance(loss, BinaryCrossEntropy):
        found = torch.where(target.to(output) > 0.5, output, -output).reshape(len(output), -1)
        return found, torch.ones_like(found, dtype=torch.bool)
    if not isinstance(loss, CrossEntropy):
        raise SettingError(
            f"{type(loss).__name__} has no classes, so there are no margins and no mistakes: use a "
            "cross-entropy, or give an error of your own where one is asked for."
        )
    if target.is_floating_point():
        target = target.argmax(loss.class_axis)
    if loss.ahead:
        output, target = output[:, : -loss.ahead], target[:, loss.ahead :]
    logits = output.movedim(loss.class_axis, -1).reshape(
        len(output), -1, output.size(loss.class_axis)
    )
    target = target.to(output.device).reshape(len(output), -1)
    counted = target != loss.ignore_index
    index = target.masked_fill(~counted, 0).unsqueeze(-1)
    right = logits.gather(-1, index).squeeze(-1)
    others = logits.scatter(-1, index, float("-inf")).amax(-1)
    return right - others, counted


def mistakes(loss: Loss | Callable[[Tensor, Any], Tensor]) -> Error:
    """A function of output and target that gives the share of wrong answers of each sample,
    ``[n]``. A tie is wrong.

    Arguments:
        loss: a cross-entropy of classes or a binary one, such as ``F.cross_entropy``, which says
            where the classes are; with another loss the function raises when it is called.
    """
    known = as_loss(loss)

    def wrong(output: Tensor, target: Any) -> Tensor:
        found, counted = margins(known, output, target)
        lost = ((found <= 0) & counted).double().sum(1)
        return lost / counted.double().sum(1).clamp(min=1.0)

    return wrong


@torch.no_grad()
def margin_quantile(problem: Problem, quantile: float) -> float:
    """The margin that all but a share ``quantile`` of the answers have.

    Arguments:
        problem: model, loss (a cross-entropy) and data, on one process.
        quantile: from 0 to 1; one at which the margin is not positive raises.
    """
    if problem.comm.size > 1:
        raise SettingError(
            "A quantile of margins needs all of them in one process, but the data are spread over "
            f"{problem.comm.size}: measure without a margin."
        )
    found = []
    for batch in problem.batches("margins"):
        values, counted = margins(problem.loss, problem.output(batch), batch.targets)
        found.append(values[counted].double().cpu())
    value = float(torch.cat(found).quantile(quantile))
    if value <= 0:
        raise SettingError(
            f"The margin at the quantile {quantile:g} is {value:.3g}, as that share of the answers "
            "is wrong: give a larger quantile, or train further."
        )
    return value
