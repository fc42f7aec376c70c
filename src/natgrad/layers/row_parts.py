"""Logical matrices: several that lie in one weight, one under the other or with rows in turn.

A fused projection (query, key and value in one ``nn.Linear``; gate and up) is one matrix to torch
and several to the network: their outputs are used for different things. Taken as one, its factor G
is as wide as all of them together, and the polar factor of a step balances rows that have nothing
to do with each other. Each part is a layer of its own here, with the input that all of them share.

    (d, d, d)                        rows of the query, then of the key, then of the value
    Interleaved(3, heads=h)          the same for every head: [h, 3, d] (GPT-NeoX, Bloom)
    Interleaved((q, d, d), heads=h)  unequal ones: several queries for one key and value (Falcon)
    Interleaved(2)                   row by row in turn: gate, up, gate, up, …

A part is ``[outer, unit]`` rows of which it has some of each unit; views of all of them are strided
and nothing is copied. One matrix for each head is ``(d,) * heads``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn

from natgrad.checks import check_whole
from natgrad.errors import CoverageError, SettingError
from natgrad.layers.base import Layer
from natgrad.layers.linear import RowInputs

# Names by which fused projections are known, and into how many equal parts their rows fall: of
# nanoGPT and Hugging Face's GPT-2, of timm's vision transformers, of gated feed-forward layers.
_SQUARE = ("c_attn", "qkv", "qkv_proj", "Wqkv", "in_proj_qkv")
_DOUBLE = ("gate_up_proj", "gate_up", "w12")
# Query, key and value of each head in turn: in Hugging Face's GPT-NeoX, Bloom and Persimmon.
_BY_HEAD = ("query_key_value",)


@dataclass(frozen=True)
class Interleaved:
    """Rows of several matrices that follow each other in turn.

    Arguments:
        parts: how many matrices of equal size there are; or of each how many rows it has in a turn.
        heads: how many turns there are; ``None``: as many as there are rows of a part, so that each
            turn has one row of each.
    """

    parts: int | tuple[int, ...]
    heads: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.parts, Sequence):
            object.__setattr__(self, "parts", tuple(self.parts))
            for size in self.parts:
                check_whole(size, "Interleaved.parts", low=1)
        else:
            check_whole(self.parts, "Interleaved.parts", low=2)
        if self.heads is not None:
            check_whole(self.heads, "Interleaved.heads", low=1)

    def sizes(self, rows: int) -> tuple[int, ...]:
        """Rows of each part in a turn; none if they do not make up so many rows.

        Arguments:
            rows: of all parts together.
        """
        if isinstance(self.parts, tuple):
            turns = self.heads or (rows // sum(self.parts) if self.parts else 0)
            return self.parts if turns * sum(self.parts) == rows else ()
        each = rows // (self.parts * self.heads) if self.heads else 1
        turns = self.heads or rows // self.parts
        return (each,) * self.parts if each and turns * self.parts * each == rows else ()


# By patterns of module names; or `natgrad.layers.Experts`, by patterns of parameter names.
Split = Mapping[str, Any]


class RowPart(RowInputs):
    """Some rows of a linear layer.

    Arguments:
        name: of the part: the module's, with the number of the part behind it.
        whole: the layer whose rows they are.
        first: of its rows in a unit.
        end: behind its rows in a unit.
        unit: rows after which those of the next turn follow; ``None``: there is one turn.
    """

    def __init__(
        self, name: str, whole: RowInputs, first: int, end: int, unit: int | None = None
    ) -> None:
        super().__init__(name, whole.module)
        self.whole, self.first, self.end = whole, first, end
        self.unit = unit or whole.rows
        self.turns = whole.rows // self.unit

    @property
    def rows(self) -> int:
        return self.turns * (self.end - self.first)

    @property
    def inputs_per_row(self) -> int:
        return self.whole.inputs_per_row

    def as_weight(self, m: Tensor) -> Tensor:
        return m[0] if self.turns == 1 else m[0].unflatten(0, (self.turns, -1))

    def split(self, weight: Tensor) -> Tensor:
        return self._own(self.whole.split(weight))

    def as_bias(self, bias: Tensor) -> Tensor:
        own = self._own(bias)
        return own.view(1, self.rows) if self.turns == 1 else own

    def as_bias_shape(self, m: Tensor) -> Tensor:
        return m if self.turns == 1 else m[0].unflatten(0, (self.turns, -1))

    def _own(self, t: Tensor) -> Tensor:
        """Of ``[rows, …]`` those of this part: ``[its rows, …]``, or ``[turns, some rows, …]``."""
        if self.turns == 1:
            return t[self.first : self.end]
        by_turn: Tensor = t.unflatten(0, (self.turns, self.unit))
        return by_turn[:, self.first : self.end]

    def arrange(self, g: Tensor) -> Tensor:
        g = super().arrange(g)
        if self.turns == 1:
            return g[..., self.first : self.end]
        by_turn: Tensor = g.unflatten(-1, (self.turns, self.unit))
        return by_turn[..., self.first : self.end].flatten(-2)

    def region(self, parameter: nn.Parameter) -> tuple[tuple[int, int], ...]:
        own: tuple[tuple[int, int], ...] = ((self.first, self.end),)
        if self.turns > 1:
            own = ((0, self.turns), *own)
        if parameter.ndim == 1:
            return own
        inputs = (0, self.inputs_per_row)
        # A weight that is stored as [inputs, outputs] has its rows along the second axis.
        return (*own, inputs) if self._rows_first else (inputs, *own)

    def unfolding(self, parameter: nn.Parameter) -> tuple[int, int] | None:
        if self.turns == 1:
            return None
        return 0 if parameter.ndim == 1 or self._rows_first else 1, self.unit

    @property
    def _rows_first(self) -> bool:
        return type(self.whole).split is RowInputs.split


def parts_of(
    layer: Layer[nn.Module], split: Split | None, parent: nn.Module | None = None
) -> list[Layer[nn.Module]]:
    """The logical matrices of a layer; the layer itself if it is one.

    Arguments:
        layer: as it was found.
        split: rows of each part by patterns of module names; ``None`` takes those that are known by
            their names.
        parent: the module that has the layer's, which may say how many heads there are.
    """
    how = _how(layer, split, parent)
    if not isinstance(layer, RowInputs):
        return [layer]
    sizes = how.sizes(layer.rows) if isinstance(how, Interleaved) else how
    if isinstance(how, Interleaved) and not sizes:
        raise CoverageError(
            f"split cuts {layer.kind} {layer.name!r} by {how!r}, which its {layer.rows} rows are "
            "no multiple of: pass the parts and heads that the model has."
        )
    if len(sizes) < 2:
        return [layer]
    unit = sum(sizes) if isinstance(how, Interleaved) else None
    if min(sizes) < 1 or (unit is None and sum(sizes) != layer.rows):
        raise CoverageError(
            f"split cuts {layer.kind} {layer.name!r} into {tuple(sizes)} rows, {sum(sizes)} in "
            f"all, but it has {layer.rows}: pass sizes that add up to that."
        )
    return [
        RowPart(f"{layer.name}.{index}" if layer.name else str(index), layer, first, end, unit)
        for index, (first, end) in enumerate(pairwise(accumulate(sizes, initial=0)))
    ]


def _how(
    layer: Layer[nn.Module], split: Split | None, parent: nn.Module | None
) -> Sequence[int] | Interleaved:
    for pattern, how in (split or {}).items():
        if fnmatchcase(layer.name, pattern):
            if not isinstance(layer, RowInputs):
                raise CoverageError(
                    f"split has {pattern!r}, which matches {layer.kind} {layer.name!r}, but only "
                    "linear layers have rows that can be split: leave it out."
                )
            if not isinstance(how, Interleaved | Sequence) or isinstance(how, str):
                raise SettingError(
                    f"split[{pattern!r}] is {how!r} but must say which rows belong together: pass "
                    "rows of each matrix, such as (8, 8, 8), or natgrad.layers.Interleaved(...)."
                )
            return how
    if split is not None or not isinstance(layer, RowInputs):
        return ()
    last = layer.name.rpartition(".")[2]
    if last in _SQUARE and layer.rows == 3 * layer.inputs_per_row:
        return (layer.rows // 3,) * 3
    if last in _DOUBLE and layer.rows % 2 == 0:
        return (layer.rows // 2,) * 2
    if last in _BY_HEAD and layer.rows == 3 * layer.inputs_per_row:
        heads = _heads(parent)
        return Interleaved(3, heads) if heads and layer.rows % (3 * heads) == 0 else ()
    return ()


def _heads(parent: Any) -> int | None:
    """How many heads an attention has, as far as it says so."""
    for owner in (parent, getattr(parent, "config", None)):
        for name in ("num_heads", "num_attention_heads", "n_heads", "n_head"):
            if isinstance(found := getattr(owner, name, None), int) and found > 0:
                return found
    return None
