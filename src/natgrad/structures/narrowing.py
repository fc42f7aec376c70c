"""What is kept of a factor that is too wide to be decomposed.

A factor of ``d`` columns takes ``d^2`` numbers and ``25 d^3`` operations: 9,217 columns, as of the
linear layer behind two convolutions, are 20 teraflop, where the training step is 5 gigaflop. Of a
side above the limit are kept

    A, of the inputs          diagonal blocks of at most `BLOCK` columns
    G, of output gradients    its diagonal

Neighbouring inputs (pixels of a channel, channels of a pixel) vary together, which blocks keep.
Output units that are many are classes or words: their gradients ``p - y`` are nearly uncorrelated,
and a diagonal keeps how often each occurs. docs/wide_layers.md has what was measured.
"""

from dataclasses import fields
from typing import Any, Protocol

from natgrad.checks import check_whole
from natgrad.layers import Layer, SharedInput
from natgrad.linalg.forms import BlockTriangle, DiagonalForm, Form

# Columns of a block of A. With 256, decomposing all blocks of a layer once in a hundred steps costs
# less than training it with a hundred samples a step, from 28 output units on; smaller ones leave
# out more.
BLOCK = 256
# Widest factor that is kept whole, by default: 5,000 columns are 3 teraflop, half a minute of a
# core. The widest factor of a ResNet-50 has 4,608.
MAX_DIM = 5000


class InBlocks(Protocol):
    """A structure of two factors that may be kept in part."""

    @property
    def input_block(self) -> int | None: ...

    @property
    def gradient_block(self) -> int | None: ...


def narrow_form(form: Form, block: int | None) -> Form:
    """The same factor of which only diagonal blocks are kept; itself where that is all of it.

    Arguments:
        form: how the whole factor is kept.
        block: columns of the largest block; 1 for the diagonal, ``None`` for the whole factor.
    """
    if block is None or form.diagonal or form.dim <= block:
        return form
    if block == 1:
        return DiagonalForm(form.dim, form.batch)
    return BlockTriangle(form.dim, block, form.batch)


def narrow_blocks(structure: InBlocks, layer: Layer[Any], max_dim: int) -> dict[str, Any]:
    """The blocks of those sides that are too wide and for which the user has not said any.

    Arguments:
        structure: as the user or the default has it.
        layer: the one that says how the weight is a matrix.
        max_dim: widest factor that is kept whole.
    """
    if not isinstance(layer, SharedInput):
        return {}
    found: dict[str, Any] = {}
    a, g = layer.input_form(), layer.gradient_form()
    if structure.input_block is None and a.dim > max_dim and not a.diagonal:
        found["input_block"] = min(BLOCK, max_dim)
    if structure.gradient_block is None and g.dim > max_dim and not g.diagonal:
        found["gradient_block"] = 1
    return found


def check_blocks(structure: InBlocks) -> None:
    """Raise SettingError for sizes that are none.

    Arguments:
        structure: whose sizes are looked at.
    """
    for name in ("input_block", "gradient_block"):
        value = getattr(structure, name)
        if value is not None:
            check_whole(value, f"{type(structure).__name__}.{name}", low=1)


def short_repr(structure: Any) -> str:
    """As dataclasses have it, without blocks that were not asked for: states that were saved before
    there were any still fit.

    Arguments:
        structure: a dataclass.
    """
    parts = [
        f"{one.name}={value!r}"
        for one in fields(structure)
        if (value := getattr(structure, one.name)) is not None
    ]
    return f"{type(structure).__name__}({', '.join(parts)})"
