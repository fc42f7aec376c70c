"""Matrices with blocks along their diagonal, of which nothing else is written out.

    diag(B_1, B_2, …)    as few batched tensors ``[b, count, size, size]``: one for each block size

A wide factor is kept so: of ``d = 9,217`` columns with blocks of at most 256, 37 blocks of 250 and
249 columns are 1/37 of the numbers, and their decompositions 1/1,369 of the operations.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# How many blocks there are of a size, and that size, in the order of the columns.
Sections = tuple[tuple[int, int], ...]


def even_sections(dim: int, size: int) -> Sections:
    """As few blocks as possible with at most ``size`` columns each, of equal size or one less.

    Arguments:
        dim: columns in all.
        size: of the largest block.
    """
    count = -(-dim // size)
    small, large = dim // count, dim % count  # so many blocks have one column more
    found = ((large, small + 1), (count - large, small))
    return tuple((many, each) for many, each in found if many)


def spans(sections: Sections) -> Iterator[tuple[int, int, int, int]]:
    """``(first column, end, count, size)`` of every section.

    Arguments:
        sections: in the order of the columns.
    """
    first = 0
    for count, size in sections:
        yield first, first + count * size, count, size
        first += count * size


class BlockDiagonal:
    """Goes where a stack of matrices ``[b, d, d]`` goes in `natgrad.linalg.products`.

    Arguments:
        sections: ``[b, count, size, size]`` each, in the order of the columns.
    """

    ndim = 3

    @classmethod
    def of(cls, dense: Tensor, sections: Sections) -> "BlockDiagonal":
        """The diagonal blocks of dense matrices.

        Arguments:
            dense: ``[b, d, d]``.
            sections: counts and sizes of the blocks.
        """
        found = []
        for first, end, count, size in spans(sections):
            square = dense[:, first:end, first:end].unflatten(2, (count, size))
            blocks = square.unflatten(1, (count, size)).diagonal(dim1=1, dim2=3)
            found.append(blocks.permute(0, 3, 1, 2).contiguous())
        return cls(found)

    def __init__(self, sections: Sequence[Tensor]) -> None:
        self.sections = tuple(sections)
        self.dim = sum(section.shape[1] * section.shape[2] for section in self.sections)
        self.shape = torch.Size((len(self.sections[0]), self.dim, self.dim))

    @property
    def mT(self) -> "BlockDiagonal":  # noqa: N802 (as tensors have it)
        return BlockDiagonal([section.mT for section in self.sections])

    def numel(self) -> int:
        """Numbers that are kept."""
        return sum(section.numel() for section in self.sections)

    def to(self, dtype: torch.dtype) -> "BlockDiagonal":
        """In another dtype.

        Arguments:
            dtype: of floating point.
        """
        return BlockDiagonal([section.to(dtype) for section in self.sections])

    def square(self) -> "BlockDiagonal":
        """Entry by entry."""
        return BlockDiagonal([section.square() for section in self.sections])

    def diagonal(self) -> Tensor:
        """``[b, d]``."""
        parts = [section.diagonal(dim1=2, dim2=3).flatten(1) for section in self.sections]
        return torch.cat(parts, 1)

    def times(self, other: "BlockDiagonal") -> "BlockDiagonal":
        """The product of two that have the same sections.

        Arguments:
            other: the right one.
        """
        pairs = zip(self.sections, other.sections, strict=True)
        return BlockDiagonal([left @ right for left, right in pairs])

    def scaled_rows(self, scale: Tensor) -> "BlockDiagonal":
        """``diag(scale)`` times this.

        Arguments:
            scale: ``[b, d]``.
        """
        out = []
        for (first, end, count, size), section in self._pairs():
            out.append(scale[:, first:end].unflatten(1, (count, size)).unsqueeze(-1) * section)
        return BlockDiagonal(out)

    def left_of(self, m: Tensor, out: Tensor | None = None) -> Tensor:
        """This times ``m``.

        Arguments:
            m: ``[…, b, d, k]``.
            out: of the shape of ``m``, where the result is written; ``None`` makes a new tensor.
        """
        out = torch.empty_like(m) if out is None else out
        for (first, end, count, size), section in self._pairs():
            piece = m[..., first:end, :].unflatten(-2, (count, size))
            out[..., first:end, :].unflatten(-2, (count, size)).copy_(section @ piece)
        return out

    def right_of(self, m: Tensor, out: Tensor | None = None) -> Tensor:
        """``m`` times this.

        Arguments:
            m: ``[…, b, k, d]``.
            out: of the shape of ``m``, where the result is written; ``None`` makes a new tensor.
        """
        out = torch.empty_like(m) if out is None else out
        for (first, end, count, size), section in self._pairs():
            piece = m[..., first:end].unflatten(-1, (count, size)).transpose(-3, -2)
            into = out[..., first:end].unflatten(-1, (count, size)).transpose(-3, -2)
            into.copy_(piece @ section)
        return out

    def dense(self) -> Tensor:
        """``[b, d, d]``."""
        out = self.sections[0].new_zeros(self.shape)
        for (first, end, count, size), section in self._pairs():
            board = out[:, first:end, first:end].unflatten(2, (count, size))
            blocks = board.unflatten(1, (count, size)).diagonal(dim1=1, dim2=3)  # [b, s, s, count]
            blocks.copy_(section.permute(0, 2, 3, 1))
        return out

    def _pairs(self) -> Iterator[tuple[tuple[int, int, int, int], Tensor]]:
        own = tuple((section.shape[1], section.shape[2]) for section in self.sections)
        yield from zip(spans(own), self.sections, strict=True)


Matrix = Tensor | BlockDiagonal
