"""How symmetric matrices are kept: as few numbers as possible, in one flat buffer.

    Triangle       slabs of the upper triangle
    BlockTriangle  those of blocks along the diagonal, for what is wide
    DiagonalForm   the diagonal
    Correlations   distinct blocks of a convolution's input factor (in `correlation`)

Every form is linear: the buffer of ``M1 + M2`` is the sum of their buffers. So whatever a factor is
of, it can be added to, averaged, scaled, sent and saved without knowing what is in the buffer, and
a new form needs no change anywhere else. It becomes a dense matrix only to be decomposed.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from natgrad.linalg.block_diagonal import BlockDiagonal, Matrix, Sections, even_sections, spans
from natgrad.linalg.half_products import accumulate, taken
from natgrad.specs import FactorSpec


class Form(ABC):
    """``batch`` symmetric ``dim x dim`` matrices as a buffer of ``numel`` numbers."""

    dim: int
    batch: int
    numel: int
    diagonal: bool = False
    sections: Sections = ()  # of diagonal blocks, where only these are kept
    half_products: bool | None = None  # whether 16-bit numbers are multiplied as they are

    def operand_dtype(self, rows: object, kept: Tensor) -> torch.dtype:
        """That in which ``rows`` are multiplied: that of the sums ``kept``, but for 16-bit numbers
        of which products are taken as they are (`natgrad.linalg.half_products`)."""
        dtype: torch.dtype = getattr(rows, "dtype", kept.dtype)
        if dtype.itemsize == 2 and kept.dtype == torch.float32:
            return dtype if taken(dtype, kept.device, self.half_products) else kept.dtype
        return kept.dtype

    @abstractmethod
    def dense(self, kept: Tensor) -> Tensor:
        """``kept [numel]`` -> ``[batch, dim, dim]``, symmetric."""

    @abstractmethod
    def trace(self, kept: Tensor) -> Tensor:
        """``kept [numel]`` -> ``[batch]``."""

    def entries(self, kept: Tensor) -> Matrix:
        """``[batch, dim, dim]``, or ``[batch, dim]`` where all others are zero."""
        return self.dense(kept)

    def scaled(self, kept: Tensor, factors: Tensor) -> Tensor:
        """``kept [numel]`` with each of the matrices multiplied by one of ``factors [batch]``."""
        return (kept.view(self.batch, -1) * factors.unsqueeze(1)).flatten()

    @property
    def sent(self) -> int:
        """Numbers on the wire: none twice."""
        return self.numel

    def pack(self, kept: Tensor) -> Tensor:
        """``kept [numel]`` -> ``[sent]``."""
        return kept

    def unpack(self, packed: Tensor) -> Tensor:
        """``packed [sent]`` -> ``[numel]``."""
        return packed

    @property
    def dense_room(self) -> int:
        """Numbers that are allocated at the busiest moment of ``dense``."""
        return 2 * self.batch * self.dim**2

    @property
    def spec(self) -> FactorSpec:
        """Sizes of the matrices that are decomposed."""
        return FactorSpec(self.dim, self.batch, self.numel, self.diagonal)

    @property
    def section_specs(self) -> tuple[FactorSpec, ...]:
        """The same where matrices of several sizes are decomposed, one for each size."""
        return (self.spec,)


class RowForm(Form):
    """A form to which outer products of any rows can be added."""

    @abstractmethod
    def add_rows(self, kept: Tensor, rows: Tensor, others: Tensor | None = None) -> None:
        """``kept += sum_k r_k r_k^T`` for ``rows [batch, k, n]``, of `operand_dtype`.

        ``n`` may be ``dim - 1``: a constant 1 is then the last feature of every row. It is never
        written out, as that would copy the activations. With ``others [batch, k, dim]`` it is
        ``sum_k r_k o_k^T``, which must be symmetric.
        """


@lru_cache(maxsize=4096)
def slabs(dim: int) -> tuple[tuple[int, int, int], ...]:
    """``(first row, end row, offset)`` of the slabs that cover the upper triangle.

    A slab holds rows ``i:j`` and columns ``i:dim``. Few slabs waste numbers below the diagonal,
    many make small products; eight cost 6% more numbers than the triangle and need no index.
    """
    count = 1 if dim < 96 else 2 if dim < 192 else 4 if dim < 512 else 8 if dim < 2500 else 12
    height = -(-dim // count) if dim else 1
    out, offset = [], 0
    for i in range(0, dim, height):
        j = min(dim, i + height)
        out.append((i, j, offset))
        offset += (j - i) * (dim - i)
    return tuple(out)


class Triangle(RowForm):
    """The upper triangle, in slabs of rows that matrix products can write to directly."""

    def __init__(self, dim: int, batch: int = 1) -> None:
        self.dim, self.batch = dim, batch
        self._each = sum((j - i) * (dim - i) for i, j, _ in slabs(dim))
        self.numel = batch * self._each

    def _slabs(self, kept: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """``(i, j, view [batch, j-i, dim-i])`` for every slab."""
        rows = kept.view(self.batch, self._each)
        for i, j, offset in slabs(self.dim):
            size = (j - i) * (self.dim - i)
            yield i, j, rows[:, offset : offset + size].unflatten(1, (j - i, self.dim - i))

    def add_rows(self, kept: Tensor, rows: Tensor, others: Tensor | None = None) -> None:
        n, last = rows.shape[-1], self.dim - 1
        right = rows if others is None else others
        for i, j, slab in self._slabs(kept):
            top = min(j, n)
            if i < top:
                accumulate(slab[:, : top - i, : n - i], rows[:, :, i:top].mT, right[:, :, i:])
        if n < self.dim:
            totals = rows.sum(1, dtype=kept.dtype)  # [batch, n]
            for i, j, slab in self._slabs(kept):
                slab[:, : min(j, n) - i, last - i] += totals[:, i : min(j, n)]
                if j == self.dim:
                    slab[:, last - i, : last - i] += totals[:, i:]  # squares are whole
                    slab[:, last - i, last - i] += rows.shape[1]

    def add_columns(self, kept: Tensor, columns: Tensor) -> None:
        """``kept += sum_{m,k} c c^T`` for ``columns [m, dim, k]`` (channels first); batch is 1."""
        m, dim, pixels = columns.shape
        if columns.dtype != kept.dtype:
            self.add_rows(kept, columns.mT.reshape(1, m * pixels, dim))
            return
        if dim <= 128 and m >= 16:
            # Many small images: one batched product and a sum use both threads, addbmm only one.
            total = torch.bmm(columns, columns.mT).sum(0)
            for i, j, slab in self._slabs(kept):
                slab[0].add_(total[i:j, i:])
            return
        for i, j, slab in self._slabs(kept):
            slab[0].addbmm_(columns[:, i:j], columns[:, i:].mT)

    @property
    def sent(self) -> int:
        """``N (N + 1) / 2`` (Osawa 2019, sec. 3.4): slabs hold whole squares on the diagonal."""
        return self.batch * self.dim * (self.dim + 1) // 2

    def pack(self, kept: Tensor) -> Tensor:
        packed = kept.new_empty(self.batch, self.dim * (self.dim + 1) // 2)
        rest = packed
        for i, j, slab in self._slabs(kept):
            rows, columns = _triangle(j - i, kept.device)
            square, beside = len(rows), (j - i) * (self.dim - j)
            rest[:, :square] = slab[:, rows, columns]
            rest[:, square : square + beside].unflatten(1, (j - i, -1)).copy_(slab[:, :, j - i :])
            rest = rest[:, square + beside :]
        return packed.flatten()

    def unpack(self, packed: Tensor) -> Tensor:
        kept = packed.new_empty(self.numel)
        rest = packed.view(self.batch, -1)
        for i, j, slab in self._slabs(kept):
            rows, columns = _triangle(j - i, kept.device)
            square, beside = len(rows), (j - i) * (self.dim - j)
            slab[:, columns, rows] = rest[:, :square]
            slab[:, rows, columns] = rest[:, :square]
            slab[:, :, j - i :] = rest[:, square : square + beside].unflatten(1, (j - i, -1))
            rest = rest[:, square + beside :]
        return kept

    def upper(self, kept: Tensor) -> Tensor:
        """``[batch, dim, dim]`` of which the upper triangle is valid and the rest is not."""
        out = kept.new_zeros(self.batch, self.dim, self.dim)
        for i, j, slab in self._slabs(kept):
            out[:, i:j, i:].copy_(slab)
        return out

    def dense(self, kept: Tensor) -> Tensor:
        out = kept.new_empty(self.batch, self.dim, self.dim)
        for i, j, slab in self._slabs(kept):
            square, beside = slab[:, :, : j - i], slab[:, :, j - i :]
            # Products leave the halves of a square apart by their rounding.
            out[:, i:j, i:j] = square.triu() + square.triu(1).mT
            out[:, i:j, j:] = beside
            out[:, j:, i:j] = beside.mT
        return out

    @property
    def dense_room(self) -> int:
        """Three squares of a slab are there while one of them is made symmetric."""
        height = max((j - i for i, j, _ in slabs(self.dim)), default=0)
        return self.batch * (self.dim**2 + 3 * height**2)

    def trace(self, kept: Tensor) -> Tensor:
        parts = [slab.diagonal(dim1=1, dim2=2).sum(1) for _, _, slab in self._slabs(kept)]
        return torch.stack(parts).sum(0)


class BlockTriangle(RowForm):
    """Blocks of at most ``size`` columns along the diagonal, each as a `Triangle`."""

    def __init__(self, dim: int, size: int, batch: int = 1) -> None:
        self.dim, self.batch = dim, batch
        self.sections = even_sections(dim, size)
        self._triangles = [Triangle(each, batch * count) for count, each in self.sections]
        self.numel = sum(triangle.numel for triangle in self._triangles)

    def _parts(self, kept: Tensor) -> Iterator[tuple[Triangle, Tensor]]:
        sizes = [triangle.numel for triangle in self._triangles]
        yield from zip(self._triangles, kept.split(sizes), strict=True)

    def add_rows(self, kept: Tensor, rows: Tensor, others: Tensor | None = None) -> None:
        for (first, end, count, size), (triangle, part) in zip(
            spans(self.sections), self._parts(kept), strict=True
        ):
            pieces = []
            for own in (t[..., first:end] for t in (rows, others) if t is not None):
                if own.shape[-1] < end - first:  # of the last section alone
                    own = torch.cat([own, own.new_ones(*own.shape[:-1], 1)], -1)
                own = own.unflatten(-1, (count, size)).transpose(1, 2)  # [batch, count, k, size]
                pieces.append(own.flatten(0, 1))
            triangle.add_rows(part, *pieces)

    def squares(self, kept: Tensor, section: int) -> Tensor:
        """The blocks of one section, ``[batch * count, size, size]``."""
        triangle, part = list(self._parts(kept))[section]
        return triangle.dense(part)

    def entries(self, kept: Tensor) -> BlockDiagonal:
        return BlockDiagonal(
            [
                self.squares(kept, index).unflatten(0, (self.batch, count))
                for index, (count, _) in enumerate(self.sections)
            ]
        )

    def dense(self, kept: Tensor) -> Tensor:
        return self.entries(kept).dense()

    def trace(self, kept: Tensor) -> Tensor:
        parts = [triangle.trace(part).view(self.batch, -1) for triangle, part in self._parts(kept)]
        return torch.cat(parts, 1).sum(1)

    def scaled(self, kept: Tensor, factors: Tensor) -> Tensor:
        found = []
        for (count, _), (triangle, part) in zip(self.sections, self._parts(kept), strict=True):
            found.append(triangle.scaled(part, factors.repeat_interleave(count)))
        return torch.cat(found)

    @property
    def sent(self) -> int:
        return sum(triangle.sent for triangle in self._triangles)

    def pack(self, kept: Tensor) -> Tensor:
        return torch.cat([triangle.pack(part) for triangle, part in self._parts(kept)])

    def unpack(self, packed: Tensor) -> Tensor:
        parts = packed.split([triangle.sent for triangle in self._triangles])
        pairs = zip(self._triangles, parts, strict=True)
        return torch.cat([triangle.unpack(part) for triangle, part in pairs])

    @property
    def dense_room(self) -> int:
        """One section after the other becomes dense."""
        return max(triangle.dense_room for triangle in self._triangles)

    @property
    def spec(self) -> FactorSpec:
        """All blocks as if they had the size of the largest."""
        count = sum(many for many, _ in self.sections)
        return FactorSpec(self.sections[0][1], self.batch * count, self.numel)

    @property
    def section_specs(self) -> tuple[FactorSpec, ...]:
        return tuple(triangle.spec for triangle in self._triangles)


# Squares of so many rows are made at a time, where a layer is as wide as a vocabulary.
_SQUARES = 1 << 22


class DiagonalForm(RowForm):
    """Only the diagonals."""

    diagonal = True

    def __init__(self, dim: int, batch: int = 1) -> None:
        self.dim, self.batch, self.numel = dim, batch, batch * dim

    def add_rows(self, kept: Tensor, rows: Tensor, others: Tensor | None = None) -> None:
        n, totals = rows.shape[-1], self.values(kept)
        if others is not None:
            totals += (rows * others).sum(1)
            return
        width = max(1, _SQUARES // max(1, rows.shape[0] * rows.shape[1]))
        for i in range(0, n, width):
            some = rows[..., i : min(n, i + width)].to(kept.dtype)
            totals[:, i : i + some.shape[-1]] += some.square().sum(1)
        if n < self.dim:
            totals[:, -1] += rows.shape[1]

    def dense(self, kept: Tensor) -> Tensor:
        return torch.diag_embed(self.values(kept))

    def values(self, kept: Tensor) -> Tensor:
        """``[batch, dim]``."""
        return kept.view(self.batch, self.dim)

    def entries(self, kept: Tensor) -> Tensor:
        return self.values(kept)

    def trace(self, kept: Tensor) -> Tensor:
        return self.values(kept).sum(1)


@lru_cache(maxsize=256)
def _triangle(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    rows, columns = torch.triu_indices(size, size, device=device)
    return rows, columns
