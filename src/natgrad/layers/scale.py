"""Layer scales, ``y = gamma * x`` with a number for each feature or channel (Touvron et al. 2021).

A norm layer without its norm: row ``r`` of ``W [features, 1]`` has the input ``x[r]`` itself. Found
by trying (`natgrad.layers.behaviour`), since every library has a class and a name for it.
"""

from typing import Any

from torch import Tensor, nn

from natgrad.layers.base import real, trainable
from natgrad.layers.elementwise import Elementwise


class Scale(Elementwise[Any]):
    """A module that multiplies its input by its only parameter.

    Arguments:
        name: of the module in the model.
        module: the module.
        parameter: a number for each feature.
        channels: whether features are the second axis of ``[n, c, *space]``, not the last one.
    """

    def __init__(self, name: str, module: nn.Module, parameter: Tensor, *, channels: bool) -> None:
        super().__init__(name, module)
        self.weight, self.bias = trainable(parameter), None
        self.features, self.channels = parameter.numel(), channels
        self.input_features = self.output_features = None if channels else 1

    @property
    def rows(self) -> int:
        return self.features

    def normalised(self, x: Tensor) -> Tensor:
        return self._positions(x.to(real(x.dtype)))

    def gradients(self, g: Tensor) -> Tensor:
        return self._positions(g)

    def _positions(self, t: Tensor) -> Tensor:
        """``[n, s, features]``."""
        if t.ndim == 2:
            return t.unsqueeze(1)
        return t.flatten(2).mT if self.channels else t.flatten(1, -2)
