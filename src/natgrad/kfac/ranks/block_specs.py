"""Blocks as the planner sees them: sizes, costs, and which rank holds which piece of a gradient.

The planner has no tensors. Each rank says which box of every parameter it holds (`box_of`); boxes
that several ranks hold are one piece with several holders, and equal slices of rows that rank 0, 1,
… holds, as FSDP makes them, are one piece in chunks. All pieces of a block must cover its
gradient exactly once, which is checked, as a number that is missing or held twice would be
preconditioned wrongly without an error.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from natgrad.capture.blocks import Block
from natgrad.comm.layouts import box_of
from natgrad.errors import SettingError
from natgrad.kfac.motion import Motion
from natgrad.kfac.slices import sliced_axis, sliced_room
from natgrad.specs import AppliedRoom, BlockSpec, Box, FactorSpec, Piece, Ranks


def boxes_of(block: Block) -> list[tuple[Box, ...]]:
    """What this rank holds of each parameter and belongs to the block: one box, or up to three
    where the rows of several matrices follow each other in turn."""
    layer = block.layers[0]
    return [
        tuple(_common(held, layer.region(p)) for held in unfolded(box_of(p), layer.unfolding(p)))
        for p in block.parameters
    ]


def unfolded(box: Box, by: tuple[int, int] | None) -> list[Box]:
    """A box of a tensor as boxes of the same with one axis as two, ``(outer, unit)``: the part of
    the first unit, whole units, and the part of the last one."""
    if by is None:
        return [box]
    axis, unit = by
    start, stop = box[axis]
    first, last = -(-start // unit), stop // unit  # whole units
    rows: list[Box] = []
    if first > last:  # inside of one unit
        rows.append(((last, first), (start - last * unit, stop - last * unit)))
    else:
        if start % unit:
            rows.append(((first - 1, first), (start % unit, unit)))
        rows.append(((first, last), (0, unit)))
        if stop % unit:
            rows.append(((last, last + 1), (0, stop % unit)))
    return [(*box[:axis], *both, *box[axis + 1 :]) for both in rows]


def view_of(
    t: Tensor, box: Box, offsets: Sequence[int], unfolding: tuple[int, int] | None
) -> Tensor:
    """A box of a tensor, as a view. ``offsets``: where the tensor begins that is indexed; 0 if
    there are none. ``unfolding``: the axis that the box sees as two, ``(outer, unit)``."""
    begins = list(offsets) or [0] * t.ndim
    if unfolding is None:
        return t[tuple(slice(a - at, b - at) for (a, b), at in zip(box, begins, strict=True))]
    axis, unit = unfolding
    (first, _), (low, _) = box[axis : axis + 2]
    rest = [*box[:axis], (first * unit + low, 0), *box[axis + 2 :]]
    shape = [b - a for a, b in box]
    stride = t.stride()
    start = sum(s * (a - at) for s, (a, _), at in zip(stride, rest, begins, strict=True))
    steps = (*stride[:axis], unit * stride[axis], *stride[axis:])
    return t.as_strided(shape, steps, t.storage_offset() + start)


def _common(one: Box, other: Box) -> Box:
    both = ((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return tuple((first, max(first, end)) for first, end in both)


def spec_of(
    block: Block,
    holders: list[dict[Box, Ranks]],
    world: int,
    motion: Motion,
    *,
    packed: bool,
) -> BlockSpec:
    """``holders[parameter]``: the ranks that hold each box of it."""
    pieces = []
    for index, held in enumerate(holders):
        own = [
            piece
            for box, ranks in sorted(held.items())
            if (piece := Piece(index, box, ranks)).numel
        ]
        pieces += _in_chunks(own, _leading(block, index), world) or own
    _check_cover(block, pieces)
    return BlockSpec(
        block.name,
        block.kind,
        block.shape,
        tuple((name, _factor(block, name, packed=packed)) for name in block.factors),
        block.decomposes,
        tuple(pieces),
        together=block.decomposed_together,
        in_basis=block.structure.in_basis,
        applied=_applied(block, motion),
        moments=sum(prod(shape) for shape in motion.kept(block.shape).values()),
        operations=motion.geometry.operations(block.shape),
    )


def _applied(block: Block, motion: Motion) -> AppliedRoom:
    """As the decomposed block says, made of parts without numbers; where a geometry whitens, the
    roots of its factors, and what a polar factor is made of: products, or on CPUs the eigenvectors
    of its smaller Gram matrix."""
    numel = prod(block.shape)
    if motion.geometry.function(0.0) is None:
        dims = [block.forms[name].spec for name in block.decomposes]
        roots = sum(s.batch * (s.dim if s.diagonal else s.dim**2) for s in dims)
        groups, *sides = block.shape
        gram = groups * min(sides) ** 2
        return AppliedRoom(prepared=roots, scratch=numel, passing=max(4 * numel, 6 * gram))
    names = (*block.decomposes, *block.structure.in_basis)
    parts = {
        name: tuple(torch.empty(shape, device="meta") for shape in block.part_shapes(name))
        for name in names
    }
    room = block.decomposed(parts).room(numel)
    axis = sliced_axis(block, motion)
    return room if axis is None else sliced_room(block, axis, room)


def _leading(block: Block, index: int) -> int:
    """The size of a parameter's first axis, or the outer one of the two that it is seen as."""
    parameter = block.parameters[index]
    by, size = block.layers[0].unfolding(parameter), parameter.shape[0] if parameter.ndim else 1
    return size // by[1] if by is not None and by[0] == 0 else size


def _in_chunks(pieces: list[Piece], rows: int, world: int) -> list[Piece] | None:
    """One piece instead of many, if they are what each of the ranks has of a parameter's rows."""
    chunk = -(-rows // world)
    if len(pieces) < 2:
        return None
    for piece in pieces:
        (start, stop), *rest = piece.box
        (rank, *others), first = piece.holders, start // chunk
        same = [*pieces[0].box[1:]] == rest
        if others or not same or rank != first or stop > (first + 1) * chunk:
            return None
    if any(one.box[0][1] != other.box[0][0] for one, other in pairwise(pieces)):
        return None
    box = ((pieces[0].box[0][0], pieces[-1].box[0][1]), *pieces[0].box[1:])
    holders = range(pieces[0].holders[0], pieces[-1].holders[0] + 1)
    return [Piece(pieces[0].parameter, box, holders, chunk)]


def _check_cover(block: Block, pieces: list[Piece]) -> None:
    """Raise if not every number of the gradient is held by one piece, exactly."""
    held = sum(piece.numel for piece in pieces)
    apart = True
    for index, parameter in enumerate(block.parameters):
        own = [piece.box for piece in pieces if piece.parameter == index]
        if block.layers[0].unfolding(parameter) is not None:
            apart &= not any(_overlap(one, other) for one, other in pairwise(sorted(own)))
            continue
        for axis in range(parameter.ndim):
            ends = sorted({box[axis] for box in own})
            apart &= all(one[1] <= other[0] for one, other in pairwise(ends))
    if held != prod(block.shape) or not apart:
        raise SettingError(
            f"{block.kind} {block.name!r} is cut in a way that its parameters do not tell: of its "
            f"{prod(block.shape)} numbers the ranks hold {held}{'' if apart else ', some twice'}. "
            "Cut it with parallelize_module and fully_shard alone, or leave it out with "
            "exclude=[...]."
        )


def _overlap(one: Box, other: Box) -> bool:
    return all(a < d and c < b for (a, b), (c, d) in zip(one, other, strict=True))


def _factor(block: Block, name: str, *, packed: bool) -> FactorSpec:
    form = block.forms[name]
    spec = form.spec
    return FactorSpec(
        spec.dim,
        spec.batch,
        spec.numel,
        spec.diagonal,
        parts=sum(prod(shape) for shape in block.part_shapes(name)),
        sent=form.sent if packed else spec.numel,
        cost=block.inverse.cost(spec),
        workspace=max(0 if spec.diagonal else form.dense_room, block.inverse.workspace(spec)),
    )
