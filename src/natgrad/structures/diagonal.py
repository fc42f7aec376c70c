"""Only the diagonal (Osawa 2019, sec. 5.4): ``F = 1/N sum_n dW_n^2``.

``dW_n = sum_s g[n,s] a[n,s]^T`` is not written out where a sample has one position: there
``dW_n^2 = g^2 (a^2)^T``, and the sum over samples is one matrix product.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from natgrad.layers import SharedInput
from natgrad.layers.embedding import Embedding, TiedHead
from natgrad.linalg.forms import DiagonalForm, Form
from natgrad.structures.base import AnyLayer, Factors, Shape, Sums
from natgrad.structures.per_sample import PerSample


@dataclass(frozen=True)
class Diagonal(PerSample):
    """As many numbers as the layer has parameters."""

    def form(self, shape: Shape) -> Form:
        return DiagonalForm(prod(shape))

    def summaries(
        self, layer: AnyLayer, x: Any, g: Tensor, samples: int | None
    ) -> Iterator[tuple[Tensor, ...]]:
        # Inputs and gradients apart, as long as that may spare the gradients of samples.
        if isinstance(layer, SharedInput) and not isinstance(layer, Embedding):
            yield from layer.pairs(x, g, samples)
        else:
            yield from super().summaries(layer, x, g, samples)

    def folded(self, layer: AnyLayer, gs: Sequence[Tensor]) -> Sequence[Tensor]:
        # With one position a sample, the squares of gradients are all that counts of them.
        alone = isinstance(layer, SharedInput) and not isinstance(layer, Embedding | TiedHead)
        if not alone or len(gs) == 1 or gs[0].ndim != 2:
            return gs
        return [torch.stack(list(gs)).square_().sum(0).sqrt_()]

    def combine(self, one: tuple[Tensor, ...], two: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if len(one) == len(two) == 2:
            return tuple(torch.cat([a, b], 2) for a, b in zip(one, two, strict=True))
        return (_gradients(one) + _gradients(two),)  # an embedding and its tied head

    def absorb(
        self, role: str, summary: tuple[Tensor, ...], sums: Sums, decomposed: Factors
    ) -> None:
        if "F" not in sums:
            return
        total = sums["F"]
        if len(summary) == 2 and summary[0].shape[2] == 1:
            # One position: the square of a product is the product of squares.
            a, g = (t.squeeze(2).to(total.kept.dtype).square() for t in summary)
            total.kept += (g.mT @ a).flatten()
            total.count += a.shape[1]
        else:
            super().absorb(role, (_gradients(summary),), sums, decomposed)


def _gradients(summary: tuple[Tensor, ...]) -> Tensor:
    """``[n, groups, rows, cols]``."""
    if len(summary) == 1:
        return summary[0]
    a, g = summary
    return torch.einsum("bnsr,bnsc->nbrc", g, a)
