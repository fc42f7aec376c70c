"""Linear layers one after the other, ``x <- f(W x + b)``, and the last one without ``f``."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def mlp(widths: Sequence[int]) -> nn.Sequential:
    """``[n, widths[0]] -> [n, widths[-1]]`` with ReLU between the layers.

    Arguments:
        widths: of the inputs, the hidden layers and the outputs.
    """
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def autoencoder(widths: Sequence[int]) -> nn.Sequential:
    """``[n, widths[0]] -> [n, widths[0]]`` with tanh: down to a code of ``widths[-1]`` and back
    through the same widths. Outputs are logits where inputs lie between 0 and 1.

    Arguments:
        widths: of the inputs, the layers down, and the code, which is the last; the layers back up
            have the same.
    """
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((*widths, *reversed(widths[:-1]))):
        linear = nn.Linear(inputs, outputs)
        nn.init.xavier_normal_(linear.weight)  # He's factor 2 belongs to ReLU, not to tanh
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])
