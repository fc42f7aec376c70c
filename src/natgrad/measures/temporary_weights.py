"""Other weights for a while: the model has its own again afterwards, whatever happened."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from natgrad.errors import SettingError


@contextmanager
def temporary_weights(
    parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]
) -> Iterator[None]:
    """Inside, ``parameters`` hold ``values`` of the same names; afterwards the same bits as before.

    They stay the same tensors, so that hooks and optimizers do not notice.

    Arguments:
        parameters: of the model, by name.
        values: by name, in the parameters' shapes; parameters that are not among them keep their
            values.
    """
    for name, value in values.items():
        if name not in parameters:
            raise SettingError(
                f"There is no parameter {name!r} to give another value to: use names such as "
                f"{next(iter(parameters))!r}."
            )
        if value.shape != parameters[name].shape:
            raise SettingError(
                f"The value of {name!r} has the shape {list(value.shape)} but the parameter has "
                f"{list(parameters[name].shape)}: give one of that shape."
            )
    own = {name: parameters[name].detach().clone() for name in values}
    try:
        _write(parameters, values)
        yield
    finally:
        _write(parameters, own)


@torch.no_grad()
def _write(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        parameters[name].copy_(value)
