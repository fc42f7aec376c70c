"""Batches whose inputs are one tensor, for measures that look at a network from its inputs on."""

from torch import Tensor

from natgrad.errors import SettingError
from natgrad.operators.data import Batch


def single_input(batch: Batch) -> Tensor:
    """The batch's inputs as one tensor ``[n, …]``; others are refused.

    Arguments:
        batch: as `Problem.batches` gives it; its inputs must be one floating-point tensor, or a
            tuple of one.
    """
    inputs = batch.inputs
    if isinstance(inputs, tuple | list) and len(inputs) == 1:
        (inputs,) = inputs
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        given = inputs.dtype if isinstance(inputs, Tensor) else type(inputs).__name__
        raise SettingError(
            f"The inputs are of type {given}, but the measure is of networks that take one "
            "floating-point tensor: measure the part of the model behind its embedding."
        )
    return inputs
