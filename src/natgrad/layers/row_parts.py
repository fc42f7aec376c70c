"""Logical matrices: several that lie in one weight, one under the other.

A fused projection (query, key and value in one ``nn.Linear``; gate and up) is one matrix to torch
and several to the network: their outputs are used for different things. Taken as one, its factor G
is as wide as all of them together, and the polar factor of a step balances rows that have nothing
to do with each other. Each part is a layer of its own here, with the input that all of them share.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise

from torch import Tensor, nn

from natgrad.errors import CoverageError
from natgrad.layers.base import Layer
from natgrad.layers.linear import RowInputs

# Names by which fused projections are known, and into how many equal parts their rows fall: of
# nanoGPT and Hugging Face's GPT-2, of timm's vision transformers, of gated feed-forward layers.
_SQUARE = ("c_attn", "qkv", "qkv_proj", "query_key_value", "Wqkv", "in_proj_qkv")
_DOUBLE = ("gate_up_proj", "gate_up", "w12")

Split = Mapping[str, Sequence[int]]


class RowPart(RowInputs):
    """Some rows of a linear layer.

    Arguments:
        name: of the part: the module's, with the number of the part behind it.
        whole: the layer whose rows they are.
        first: of its rows.
        end: behind its rows.
    """

    def __init__(self, name: str, whole: RowInputs, first: int, end: int) -> None:
        super().__init__(name, whole.module)
        self.whole, self.first, self.end = whole, first, end

    @property
    def rows(self) -> int:
        return self.end - self.first

    @property
    def inputs_per_row(self) -> int:
        return self.whole.inputs_per_row

    def split(self, weight: Tensor) -> Tensor:
        return self.whole.split(weight)[self.first : self.end]

    def as_bias(self, bias: Tensor) -> Tensor:
        return bias[self.first : self.end].view(1, self.rows)

    def arrange(self, g: Tensor) -> Tensor:
        return super().arrange(g)[..., self.first : self.end]

    def region(self, parameter: nn.Parameter) -> tuple[tuple[int, int], ...]:
        own = (self.first, self.end)
        if parameter.ndim == 1:
            return (own,)
        inputs = (0, self.inputs_per_row)
        # A weight that is stored as [inputs, outputs] has its rows along the second axis.
        rows_first = parameter.shape[0] == self.whole.rows and self._rows_first
        return (own, inputs) if rows_first else (inputs, own)

    @property
    def _rows_first(self) -> bool:
        return type(self.whole).split is RowInputs.split


def parts_of(layer: Layer[nn.Module], split: Split | None) -> list[Layer[nn.Module]]:
    """The logical matrices of a layer; the layer itself if it is one.

    Arguments:
        layer: as it was found.
        split: rows of each part by patterns of module names; ``None`` takes those that are known by
            their names.
    """
    sizes = _sizes(layer, split)
    if len(sizes) < 2 or not isinstance(layer, RowInputs):
        return [layer]
    if sum(sizes) != layer.rows or min(sizes) < 1:
        raise CoverageError(
            f"split cuts {layer.kind} {layer.name!r} into {tuple(sizes)} rows, {sum(sizes)} in "
            f"all, but it has {layer.rows}: pass sizes that add up to that."
        )
    return [
        RowPart(f"{layer.name}.{index}" if layer.name else str(index), layer, first, end)
        for index, (first, end) in enumerate(pairwise(accumulate(sizes, initial=0)))
    ]


def _sizes(layer: Layer[nn.Module], split: Split | None) -> Sequence[int]:
    for pattern, sizes in (split or {}).items():
        if fnmatchcase(layer.name, pattern):
            if not isinstance(layer, RowInputs):
                raise CoverageError(
                    f"split has {pattern!r}, which matches {layer.kind} {layer.name!r}, but only "
                    "linear layers have rows that can be split: leave it out."
                )
            return sizes
    if split is not None or not isinstance(layer, RowInputs):
        return ()
    last = layer.name.rpartition(".")[2]
    if last in _SQUARE and layer.rows == 3 * layer.inputs_per_row:
        return (layer.rows // 3,) * 3
    if last in _DOUBLE and layer.rows % 2 == 0:
        return (layer.rows // 2,) * 2
    return ()
