"""Gradient-norm regularisation, ``L + τ/4 ‖∇L‖²``, whose gradient is ``g + τ/2 H g``."""

from collections.abc import Iterable

import torch
from torch import Tensor

from natgrad.checks import NOT_NEGATIVE, POSITIVE, number
from natgrad.errors import SettingError
from natgrad.lab.schemes.norms import total_norm
from natgrad.lab.schemes.second_pass import SecondPass, scaled


def penalized(loss: Tensor, parameters: Iterable[Tensor], tau: float) -> Tensor:
    """``loss + τ/4 ‖∇loss‖²``, exactly, by a double backward pass (Geiping et al. 2022).

    Call ``backward()`` on what it returns instead of on ``loss``. It takes the memory of both
    passes, and every function in the model must be twice differentiable. Beside `KFAC` use
    `GradientNorm`: here the output gradients of layers are those of the sum.

    Arguments:
        loss: with its graph, before ``backward()``.
        parameters: by which the gradient is taken; those without ``requires_grad`` are left out.
        tau: ``τ ≥ 0``, the weight of the penalty.
    """
    number(tau, "tau", NOT_NEGATIVE)
    wanted = [p for p in parameters if p.requires_grad]
    if not wanted or not loss.requires_grad:
        raise SettingError(
            f"penalized() was given {len(wanted)} parameters with requires_grad and a loss that "
            f"{'has' if loss.requires_grad else 'has not'} a graph, but needs both: pass "
            "model.parameters() and the loss before its backward()."
        )
    gradients = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
    squares = [g.square().sum() for g in gradients if g is not None]
    if not squares:
        raise SettingError(
            "penalized() was given a loss that depends on none of the parameters: pass those of "
            "the model it was computed with."
        )
    return loss + tau / 4 * torch.stack(squares).sum()


class GradientNorm(SecondPass):
    """``g + τ/2 H g``, with ``H g ≈ ‖g‖ (∇L(w + h g/‖g‖) - g) / h``: a second pass instead of a
    double backward one, so memory and functions are those of plain training (Geiping et al. 2022).

    Beside `KFAC`: call ``kfac.discard()`` between the two passes; the curvature is then taken from
    the second one, a distance ``h`` away.

    Arguments:
        tau: ``τ ≥ 0``, the weight of the penalty.
        h: ``> 0``, how far the weights are moved for the difference.
    """

    def __init__(self, parameters: Iterable[Tensor], tau: float, h: float = 0.01) -> None:
        super().__init__(parameters)
        self.tau = number(tau, "GradientNorm.tau", NOT_NEGATIVE)
        self.h = number(h, "GradientNorm.h", POSITIVE)

    def displacements(self, weights: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        return scaled(gradients, self.h, total_norm(gradients))

    def combine(self, first: list[Tensor], second: list[Tensor], loss_scale: float) -> None:
        weight = total_norm(first) * (self.tau / (2 * self.h * loss_scale))
        for here, there in zip(first, second, strict=True):
            # Not in half precision: a small difference times a large number.
            change = there.to(weight.dtype) - here.to(weight.dtype)
            there.copy_(here + weight.to(there.device) * change)
