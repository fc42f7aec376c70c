"""Powers of damped eigenvalues, ``(l + damping)^exponent``, and what is none."""

import torch
from torch import Tensor

from natgrad.errors import SettingError
from natgrad.linalg.symmetric import Function


def shifted_power(exponent: float, damping: float, kind: str) -> Function:
    """The function ``λ -> (λ + damping)^exponent`` of a tensor of eigenvalues. Eigenvalues that
    rounding has left a little below zero are taken as their absolute value by fractional powers.

    Arguments:
        exponent: any number; a negative one raises `SettingError` for a singular matrix without
            damping, a fractional one for negative damped eigenvalues.
        damping: ``≥ 0``, added to every eigenvalue.
        kind: name of the matrix, for error sentences.
    """

    def function(values: Tensor) -> Tensor:
        shifted = values + damping
        rounding = float(values.abs().max()) * torch.finfo(values.dtype).eps * len(values)
        zero = shifted.abs() <= rounding
        if exponent < 0 and damping == 0.0 and bool(zero.any()):
            raise SettingError(
                f"{kind} is singular, so it cannot be inverted without damping: give a damping "
                "above 0."
            )
        if exponent != int(exponent):
            shifted = torch.where(zero, shifted.abs(), shifted)
            if bool((shifted < 0).any()):
                raise SettingError(
                    f"{kind} with damping {damping:g} has the eigenvalue {float(shifted.min()):.3g}"
                    f", of which there is no power {exponent:g}: give a larger damping."
                )
        return shifted.pow(exponent)

    return function
