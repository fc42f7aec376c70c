"""A weight as wide as a vocabulary, preconditioned some rows at a time.

A head ``[32000, 2048]`` has 65 million numbers, and a step that takes all of them at once needs
its gradient five times more: going in, coming out, two products and the damped eigenvalues, 1.2
GiB. Where one of the factors is a diagonal, the rows (or columns) along it have nothing to do with
each other, so that a slice of them needs a slice of each, whatever the vocabulary is.

It holds for steps that apply a function of the block; a polar factor needs the whole matrix.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.capture.blocks import Block
from natgrad.inverses import Decomposed, Function
from natgrad.kfac.clipping import LearningRates
from natgrad.kfac.motion import Motion
from natgrad.layers import Layer
from natgrad.linalg.block_diagonal import even_sections, spans
from natgrad.specs import AppliedRoom

# Weights of more numbers are cut, into slices of at most half as many.
WHOLE = 1 << 23


def sliced_axis(block: Block, motion: Motion) -> int | None:
    """Along which axis a block's matrix ``[groups, rows, cols]`` is cut; ``None`` if it is not."""
    layer = block.layers[0]
    plain_matrix = type(layer).as_weight is Layer.as_weight and block.shape[0] == 1
    applies = motion.is_plain and motion.geometry.function(0.0) is not None
    if prod(block.shape) <= WHOLE or not plain_matrix or not applies:
        return None
    if not {"A", "G"} <= set(block.decomposes):
        return None
    axes = [axis for name, axis in (("G", 1), ("A", 2)) if block.forms[name].diagonal]
    return max(axes, key=block.shape.__getitem__, default=None)


def slices(block: Block, axis: int) -> list[slice]:
    """Of the rows or columns, of nearly one size."""
    length = block.shape[axis]
    across = prod(block.shape) // max(1, length)
    sections = even_sections(length, max(1, WHOLE // 2 // across))
    return [
        slice(first + index * size, first + (index + 1) * size)
        for first, _, count, size in spans(sections)
        for index in range(count)
    ]


def sliced_room(block: Block, axis: int, room: AppliedRoom) -> AppliedRoom:
    """What preconditioning takes, in numbers; ``room`` is for the whole of it."""
    length, numel = block.shape[axis], prod(block.shape)
    rows: int = max(part.stop - part.start for part in slices(block, axis))
    most = rows * (numel // length)

    def share(numbers: int) -> int:
        return -(-numbers * rows // length)

    # Nothing is kept prepared: it is made for each slice.
    passing = share(room.passing + room.prepared)
    return AppliedRoom(scratch=share(room.scratch), passing=passing, at_once=most)


class SlicedMatrix:
    """The gradients of one block as slices of its matrix, in buffers of the size of a slice."""

    def __init__(self, block: Block, axis: int, raw: Tensor, out: Tensor) -> None:
        self.block, self.axis, self.raw, self.out = block, axis, raw, out
        self.layer = block.layers[0]
        self.slices = slices(block, axis)

    def precondition(
        self,
        decomposed: Decomposed,
        gradients: list[Tensor],
        function: Function,
        scale: float,
        rates: LearningRates,
        *,
        unknown: bool,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Replace both gradients ``g`` by ``d``; returns ``reach^2 |<d, g>|``, and where the scale
        of the loss is ``unknown`` ``<d, g>``, ``<g, g>``, ``<d, d>`` and what was written."""
        weight, bias = self.layer.weight, self.layer.bias
        total = torch.zeros((), dtype=self.raw.dtype, device=self.raw.device)
        products = total.new_zeros(3)
        written: list[Tensor] = []
        for part in self.slices:
            shape = list(self.block.shape)
            shape[self.axis] = part.stop - part.start
            raw, out = (t[: prod(shape)].view(shape) for t in (self.raw, self.out))
            # Of each parameter: where it lies in its gradient, and in the slice of the matrix.
            places: list[tuple[nn.Parameter, Tensor, tuple[Any, ...]]] = []
            if weight is not None:
                own = self.layer.split(gradients[0])
                columns = self.layer.weight_cols
                rows = own[part] if self.axis == 1 else own[:, part]
                places.append((weight, rows, (0, slice(None), slice(0, columns))))
            if bias is not None:
                # A diagonal A has no column of ones, so that only rows are cut.
                rows = self.layer.as_bias(gradients[-1])[0, part]
                places.append((bias, rows, (0, slice(None), -1)))
            for _, rows, where in places:
                raw[where].copy_(rows)
            if scale != 1.0:
                raw *= scale
            decomposed.apply_part(function, raw, self.axis, part, out)
            for parameter, rows, where in places:
                total += rates.of(parameter) ** 2 * (raw[where] * out[where]).sum()
                rows.copy_(out[where])
                if unknown:
                    g, d = raw[where], out[where]
                    products += torch.stack([(d * g).sum(), (g * g).sum(), (d * d).sum()])
                    written.append(rows)
        return total.abs(), products, written
