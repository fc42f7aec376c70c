"""Layers in which every row has an input of its own, such as norm layers.

``y[r] = weight[r] x_hat[r] + bias[r]`` is a matrix ``W [rows, 2]`` whose row ``r`` sees
``(x_hat[r], 1)``. As rows do not share their input, there are no Kronecker factors; what the block
of such a layer is made of are per-sample gradients, which are cheap: two numbers a row.
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from natgrad.layers.axes import per_sample
from natgrad.layers.base import Layer, M, real


class Elementwise(Layer[M]):
    """Every row has an input of its own (norm layers): ``y[r] = weight[r] x_hat[r] + bias[r]``."""

    normalises = True
    inputs_per_row = 1

    def as_weight(self, m: Tensor) -> Tensor:
        return m[0, :, 0]

    def split(self, weight: Tensor) -> Tensor:
        return weight.view(-1)

    @abstractmethod
    def normalised(self, x: Any) -> Tensor:
        """What ``keep`` kept -> ``x_hat [n, s, rows]``.

        Arguments:
            x: what `keep` kept of a forward call, ``n`` samples.
        """

    @abstractmethod
    def gradients(self, g: Tensor) -> Tensor:
        """Gradient of the module's output -> ``[n, s, rows]``.

        Arguments:
            g: gradient of the module's output, samples in front.
        """

    def pixel_sums(self, x: Any, g: Tensor, samples: int | None) -> tuple[Tensor, Tensor]:
        """``sum_s g x_hat`` and ``sum_s g`` of every sample, ``[n, rows]`` each.

        Arguments:
            x: what `keep` kept of a forward call, ``n`` samples.
            g: gradient of the module's output, samples in front.
            samples: number of samples that the model was called with; ``None`` is not known. Where
                the leading axis is a multiple of it, positions are folded into that axis and are
                taken out again.
        """
        grads = self.gradients(g).to(real(g.dtype))
        products = self.normalised(x).to(grads.dtype) * grads
        of_weight, of_bias = (per_sample(t[None], samples)[0].sum(1) for t in (products, grads))
        return of_weight, of_bias

    def sample_gradients(self, x: Any, g: Tensor, samples: int | None) -> Iterator[Tensor]:
        sums = self.pixel_sums(x, g, samples)
        used = [t for p, t in zip((self.weight, self.bias), sums, strict=True) if p is not None]
        yield torch.stack(used, -1).unsqueeze(1)
