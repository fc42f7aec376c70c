"""The partial traces of a block: the Kronecker product that has the same ones, and its own trace.

    A = 1/N sum_n dW_n^T dW_n        G = 1/N sum_n dW_n dW_n^T        F = G x A / tr F

``A [cols, cols]`` is the block summed over output units, ``G [rows, rows]`` over inputs, as the two
marginals of a joint distribution; ``tr A = tr G = tr F``. Their product is one round of power
iteration from the identity towards the nearest Kronecker product (Morwani et al. 2024).

Whole gradients of samples enter, ``dW_n = sum_s g[s] a[s]^T``, and nothing depends on how such a
sum is written. `Kronecker`'s other ways take its terms for alike, which those of a gradient inside
of a loss are not: there inputs and gradients change places.

With ``K = (g[s] . g[t])`` of one sample, ``dW^T dW = a^T K a``: no ``dW`` is written out unless it
has fewer rows than terms.
"""

import torch
from torch import Tensor

from natgrad.linalg.forms import Form, RowForm
from natgrad.structures.base import Sums


def add_traces(a: Tensor, g: Tensor, sums: Sums) -> None:
    """Add the samples' ``dW^T dW`` and ``dW dW^T`` to those of the two factors that are there.

    Arguments:
        a: ``[groups, n, s, cols]``.
        g: ``[groups, n, s, rows]``.
        sums: those to add to, by the name of the factor.
    """
    for name, own, other in (("A", a, g), ("G", g, a)):
        if name not in sums:
            continue
        total, terms = sums[name], own.shape[2]
        dtype = total.kept.dtype
        own, other = own.to(dtype), other.to(dtype)
        assert isinstance(total.form, RowForm)
        if terms == 1:
            weighted = own * other.norm(dim=3, keepdim=True)
            total.form.add_rows(total.kept, weighted.flatten(1, 2))
        elif other.shape[3] <= terms:
            total.form.add_rows(total.kept, (other.mT @ own).flatten(1, 2))
        else:
            weighted = (other @ other.mT) @ own
            total.form.add_rows(total.kept, weighted.flatten(1, 2), own.flatten(1, 2))
        total.count += own.shape[1]


def more_positions(one: tuple[Tensor, ...], two: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Two calls on the same samples, as positions of one.

    Arguments:
        one: ``a`` and ``g`` of the first call, ``[groups, n, s, d]``.
        two: those of the second.
    """
    return tuple(torch.cat([a, b], 2) for a, b in zip(one, two, strict=True))


def unit_trace(kept: dict[str, Tensor], forms: dict[str, Form]) -> dict[str, Tensor]:
    """``A / tr A`` beside ``G``, whose product then has the trace of the block.

    Arguments:
        kept: factors as buffers, by name.
        forms: of all factors, by name.
    """
    if "A" not in kept:
        return kept
    trace = forms["A"].trace(kept["A"])
    scale = torch.where(trace > 0, 1.0 / trace, torch.ones_like(trace))
    return {**kept, "A": forms["A"].scaled(kept["A"], scale)}
