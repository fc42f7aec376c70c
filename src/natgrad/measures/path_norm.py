"""The path norm, ``(Σ_paths Π |w|^p)^(1/p)`` over all ways from inputs and biases to outputs.

Neyshabur et al. 2015; with pooling, biases and shortcuts, Gonon et al. 2024.

It is the sum of the outputs for inputs of ones and weights ``|w|^p``, to the power
``1/p``: one forward pass. Moving scale from a ReLU's inputs to its outputs leaves it alone,
and with p = 1 it bounds the Lipschitz constant; p = 2 is the usual measure of capacity.
"""

from typing import Any

import torch
from torch import Tensor, nn

from natgrad.checks import POSITIVE, number
from natgrad.errors import SettingError
from natgrad.measures.inputs import single_input
from natgrad.measures.paths import along_paths, plain
from natgrad.operators import Problem, requirements
from natgrad.operators.data import Data


@torch.no_grad()
def path_norm(
    model: nn.Module | Problem, loss: Any = None, data: Any = None, *, power: float = 2.0
) -> float:
    """Of a network of linear layers, ReLU, BatchNorm in evaluation mode, pooling and shortcuts; all
    else is refused. Of the data only the shape of an input is used, and the loss not at all.

    Every way through a pooling counts, as does each position of a convolution; an average over k
    inputs has weights 1/k, and a maximum weights 1. Calculated in float64.

    Arguments:
        model: the network, or a `Problem`, of which the network and the data are used. Dropout and
            BatchNorm must be in evaluation mode.
        loss: not used, so that all measures take the same arguments.
        data: one batch, or an iterable of batches, of which only the shape of one input is used;
            its inputs must be one tensor. ``None`` beside a `Problem`.
        power: ``p > 0``: 1 bounds the Lipschitz constant, 2 is the usual measure of capacity.
    """
    p = number(power, "power", POSITIVE)
    network = model.model if isinstance(model, Problem) else model
    batches = model.data if isinstance(model, Problem) else Data(data)
    requirements.model(network)
    parameter = next(network.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    shape = single_input(next(iter(batches))).shape[1:]
    ones = torch.ones(1, *shape, dtype=torch.float64, device=device)
    found = network(along_paths(ones, p))
    if not isinstance(found, Tensor):
        raise SettingError(
            f"The model returned an object of type {type(found).__name__}, but a path norm is of "
            "the entries of one tensor: wrap it in a module that returns one."
        )
    norm: float = float(plain(found).sum()) ** (1 / p)
    return norm
