"""Which experts' matrices a tensor shows, and along which of its axes.

A model takes one expert, some of them, a transpose, a part of the rows: nearly always a view of the
parameter, whatever function made it. So a tensor is read by its place in memory: from its offset
and its strides follow where it begins and along which axes it goes.

    e    experts; several axes where they were gathered by a table ``[tokens, k]``
    o    rows of a matrix, its outputs
    i    columns, its inputs

Copies (of gathered experts, in another dtype) are `Matrices` of their own, whose views are read in
the same way.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class Matrices:
    """A parameter with experts, or a copy of some of them.

    Arguments:
        tensor: ``[b, ., .]``; held, so that its memory is not used again.
        order: ``oi`` or ``io``: which of the last axes is which.
        ids: ``[b]``, the experts along the first.
        rows: which rows of the experts' matrices there are.
        source: whose parameter it is.
    """

    tensor: Tensor
    order: str
    ids: Tensor
    rows: range
    source: Any

    def holds(self, t: Tensor) -> bool:
        """Whether a tensor of the same storage begins inside of it: others may lie there, too."""
        mine, first = self.tensor, t.storage_offset() - self.tensor.storage_offset()
        last = sum((n - 1) * s for n, s in zip(mine.shape, mine.stride(), strict=True))
        return 0 <= first <= last


@dataclass(eq=False)
class View:
    """A tensor that shows matrices.

    Arguments:
        of: the matrices.
        axes: what each of its axes is; nothing where it repeats itself, or has one expert.
        ids: ``[b]``, the experts along its axes ``e``, in their order; of one if there are none.
        rows: which rows of the experts' matrices it has.
        whole: whether it has all columns.
    """

    of: Matrices
    axes: tuple[str, ...]
    ids: Tensor
    rows: range
    whole: bool

    def transposed(self) -> "View":
        """With the last two axes in the other order."""
        return replace(self, axes=(*self.axes[:-2], self.axes[-1], self.axes[-2]))

    def copied_to(self, out: Tensor, ids: Tensor | None = None) -> Matrices | None:
        """A copy of the same matrices, or of those of ``ids [...]``; ``None`` if it is of parts of
        columns, or not of the form ``[..., ., .]``."""
        order = "".join(self.axes[-2:])
        lead = self.axes[:-2] if ids is None else ()
        if not self.whole or order not in ("oi", "io") or set(lead) - {"e", ""}:
            return None
        kept = self.ids if ids is None else ids.flatten()
        stack = out.unsqueeze(0) if out.ndim == 2 else out.flatten(0, -3)
        if len(stack) != len(kept) or stack.data_ptr() != out.data_ptr():
            return None
        return Matrices(stack, order, kept, self.rows, self.of.source)


def read(t: Tensor, of: Matrices) -> View | None:
    """What a tensor in the memory of matrices shows of them; ``None`` if that is nothing regular.

    Arguments:
        t: of any shape.
        of: matrices that hold it.
    """
    sizes, strides = of.tensor.shape, of.tensor.stride()
    order = sorted((k for k in range(3) if sizes[k] > 1), key=strides.__getitem__, reverse=True)
    begins, left = [0, 0, 0], int(t.storage_offset()) - int(of.tensor.storage_offset())
    for k in order:
        begins[k], left = divmod(left, strides[k])
    if left or any(begin >= size for begin, size in zip(begins, sizes, strict=True)):
        return None
    ends = list(begins)
    steps = [1, 1, 1]
    found: list[int | None] = []  # which axis of the matrices each is
    positions = torch.full((), begins[0], dtype=torch.int64, device=of.ids.device)
    for n, stride in zip(t.shape, t.stride(), strict=True):
        if n == 1 or stride == 0:
            found.append(None)
            continue
        fitting = [k for k in order if stride % strides[k] == 0 and stride >= strides[k]]
        if not fitting or (fitting[0] in found and fitting[0] != 0):
            return None
        k = fitting[0]
        steps[k] = stride // strides[k]
        ends[k] += (n - 1) * steps[k]
        if ends[k] >= sizes[k]:
            return None
        if k == 0:
            along = torch.arange(n, device=of.ids.device) * steps[0]
            positions = positions.unsqueeze(-1) + along
        found.append(k)
    names = ("e", *of.order)
    axes = ["" if k is None else names[k] for k in found]
    _name_single(axes, t.shape, of.order)
    parts = {names[k]: range(begins[k], ends[k] + 1, steps[k]) for k in (1, 2)}
    rows = of.rows[parts["o"].start : parts["o"].stop : parts["o"].step]
    whole = len(parts["i"]) == sizes[1 + of.order.index("i")]
    return View(of, tuple(axes), of.ids[positions.flatten()], rows, whole)


def _name_single(axes: list[str], shape: Sequence[int], order: str) -> None:
    """Of the last two axes one with a single entry is the row, or the column, that no other is."""
    for k in range(max(0, len(axes) - 2), len(axes)):
        missing = [name for name in order if name not in axes]
        if not axes[k] and shape[k] == 1 and missing:
            axes[k] = missing[0]
