"""Uses of a linear layer's weight inside of gradients that the loss depends on.

    y = W a + b     the layer itself
    p = W^T q       its own backward pass, with create_graph=True: q = du/dy, p = du/da
    z = W v         the backward pass of that one

The gradient of a sample is ``(dL/dy) (a, 1)^T + q (dL/dp, 0)^T + (dL/dz) (v, 0)^T + ...``: further
positions of the same matrix, without the bias; for ``p`` input and gradient have changed places.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from natgrad.layers.axes import grouped, per_sample, piece, real
from natgrad.layers.base import SharedInput
from natgrad.layers.linear import Linear


class InnerUse(Linear):
    """``z = W v``: a linear layer that is called without its bias.

    Arguments:
        layer: the linear layer, or another use of its weight.
    """

    input_is_rows = False  # a bias's column is not one of ones

    def __init__(self, layer: SharedInput[Any]) -> None:
        self.__dict__.update(layer.__dict__)

    def with_ones(self, a: Tensor) -> Tensor:
        """With zeros in the column of the bias, which this use does not add.

        Arguments:
            a: ``[..., weight_cols]``.
        """
        return a if self.bias is None else torch.cat([a, a.new_zeros(*a.shape[:-1], 1)], -1)


class TransposedUse(InnerUse):
    """``p = W^T q``: what is kept as its input is ``q``, over W's rows."""

    transposed = True

    def pairs(self, x: Any, g: Tensor, samples: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        dtype = real(g.dtype)
        rows = per_sample(grouped(self.inputs(x)).to(dtype), samples)
        cols = per_sample(self.with_ones(grouped(self.gradients(g)).to(dtype)), samples)
        count = piece(self.shape)
        for i in range(0, rows.shape[1], count):
            yield cols[:, i : i + count], rows[:, i : i + count]


def next_use(layer: SharedInput[Any]) -> InnerUse | None:
    """The use of the weight that the backward pass of another one is, if it is known.

    Arguments:
        layer: that the backward pass goes through.
    """
    if isinstance(layer, TransposedUse):
        return InnerUse(layer)
    return TransposedUse(layer) if type(layer) in (Linear, InnerUse) else None
