"""Weights brought back to one norm, ``w ← √(2 d_out) w / (‖w‖ + 1e-9)``, after each step."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from natgrad.checks import NOT_NEGATIVE, number
from natgrad.errors import SettingError
from natgrad.lab.schemes.norms import norm


class WeightRescaling:
    """Call ``step()`` after ``optimizer.step()``: the weights of ``layers`` get norm ``√(2 d_out)``
    (Osawa 2019, eq. 18), which is the one that HeNormal initialisation gives them.

    ``d_out`` is the number of output units or channels. Behind a layer that normalises, the network
    computes the same whatever the norm is; `normalized_layers` finds the layers of which that is
    true. The learning rate then means the same during the whole training.

    Arguments:
        layers: modules with a weight matrix, such as ``normalized_layers(model, inputs).values()``.
        epsilon: ``≥ 0``, added to ``‖w‖``.
    """

    def __init__(self, layers: Iterable[nn.Module], epsilon: float = 1e-9) -> None:
        self.epsilon = number(epsilon, "WeightRescaling.epsilon", NOT_NEGATIVE)
        self.layers = list(layers)
        self.targets = {_weight(layer): math.sqrt(2 * _outputs(layer)) for layer in self.layers}
        if not self.layers:
            raise SettingError(
                "WeightRescaling was given no layers and would do nothing: pass modules with a "
                "weight, such as normalized_layers(model, inputs).values()."
            )

    @torch.no_grad()
    def step(self) -> None:
        for weight, target in self.targets.items():
            weight.mul_((target / (norm(weight) + self.epsilon)).to(weight.dtype))


def _weight(layer: nn.Module) -> Tensor:
    weight = layer._parameters.get("weight") if isinstance(layer, nn.Module) else None
    if weight is None or weight.ndim < 2:
        raise SettingError(
            f"WeightRescaling was given a {type(layer).__name__} but needs modules with a weight "
            "matrix that is a parameter of its own: pass linear layers and convolutions."
        )
    return weight


def _outputs(layer: nn.Module) -> int:
    """Of transposed convolutions the first axis of the weight is that of the inputs."""
    for name in ("out_features", "out_channels"):
        if isinstance(count := getattr(layer, name, None), int):
            return count
    return len(_weight(layer))
