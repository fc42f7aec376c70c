"""Layers of one weight: which of them are one block, and which of them says how it is a matrix.

Uses in the same orientation, such as two modules with one weight, are further positions of the same
sums. A tied embedding and head use ``W`` and ``W^T``: the embedding comes first, and the head
becomes a `TiedHead`, whose factors `natgrad.structures.kronecker` merges with the embedding's.
Where a weight holds several matrices, each of them is tied by itself.
"""

from collections.abc import Iterable
from copy import copy
from typing import Any

from natgrad.errors import CoverageError
from natgrad.layers import Layer
from natgrad.layers.embedding import Embedding, TiedHead
from natgrad.layers.experts import Expert
from natgrad.layers.functional import Projection
from natgrad.layers.linear import Linear
from natgrad.layers.row_parts import RowPart


def tied(layers: Iterable[Layer[Any]], *, biases: bool) -> list[list[Layer[Any]]]:
    """Layers of one weight together, an embedding first. ``biases``: those that only one use of a
    weight has are blocks of their own."""
    groups: dict[Any, list[Layer[Any]]] = {}
    for layer in layers:
        weight = layer.weight if layer.weight is not None else layer.bias
        part: Any = None  # of the weight, where it holds several matrices
        if isinstance(layer, RowPart):
            part = layer.first
        elif isinstance(layer, Expert):
            part = layer.index, layer.first
        elif isinstance(layer, Projection):
            part = (layer.slice if layer.weight is None else layer.own(layer.weight)).start
        groups.setdefault((id(weight), part, layer.weight is None), []).append(layer)
    out, alone = [], []
    cut = {weight for weight, part, _ in groups if part is not None}
    for (weight, part, _), group in groups.items():
        if part is None and weight in cut:
            raise CoverageError(
                f"{group[0].kind} {group[0].name!r} shares its weight with a layer whose rows are "
                "split into several matrices: pass split={} to KFAC, or leave one of them out with "
                "exclude=[...]."
            )
        with_bias = [_bias_alone(layer) for layer in group if biases and layer.bias is not None]
        embeddings = [layer for layer in group if isinstance(layer, Embedding)]
        if embeddings:
            heads = [u for u in group if isinstance(u, Linear) and u.call is None]
            others = [layer for layer in group if layer not in embeddings and layer not in heads]
            ties: list[Layer[Any]] = [_transposed(head) for head in heads]
            group = [*embeddings, *ties, *others]
        primary = group[0]
        same = [u for u in group if isinstance(u, TiedHead) or u.shape[:2] == primary.shape[:2]]
        if len(same) != len(group):
            odd = next(u for u in group if u not in same)
            raise CoverageError(
                f"{odd.kind} {odd.name!r} and {primary.kind} {primary.name!r} share a weight but "
                "see it as different matrices. Leave one of them out with exclude=[...]."
            )
        if len({id(layer.bias) for layer in group}) > 1:
            for layer in group:
                layer.bias = None  # it belongs to one use only, so it is no column of the shared W
        out.append(group)
        kept = {id(layer.bias) for layer in group}
        alone += [layer for layer in with_bias if id(layer.bias) not in kept]
    by_bias = {id(layer.bias): [u for u in alone if u.bias is layer.bias] for layer in alone}
    return out + list(by_bias.values())


def _bias_alone(layer: Layer[Any]) -> Layer[Any]:
    """The bias of one use of a weight, which others use without it."""
    bias = copy(layer)
    bias.name, bias.weight, bias.prefers_diagonal = f"{layer.name}.bias", None, True
    return bias


def _transposed(head: Linear) -> TiedHead:
    tied = TiedHead(head.name, head.module)
    tied.batch_axis, tied.axis_given = head.batch_axis, head.axis_given
    return tied
