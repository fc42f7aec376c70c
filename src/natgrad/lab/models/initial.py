"""How weights start: HeNormal, ``W ~ N(0, 2 / fan_in)``, which keeps activations behind a ReLU of
one size from layer to layer."""

from typing import TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def he_normal_(model: M) -> M:
    """Linear and convolution weights anew, by HeNormal, and their biases to zero; transposed
    convolutions and all other parameters keep their values.

    Arguments:
        model: changed in place, and returned.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model
