"""One factor of a block after its decomposition: whole, a diagonal, or in diagonal blocks.

Only the inverse that made the parts looks into them. What is wide is kept in blocks
(`natgrad.linalg.forms.BlockTriangle`): to an inverse they are a batch of small matrices, and this
file puts what it makes of them together again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from natgrad.linalg.block_diagonal import BlockDiagonal, Matrix, Sections, spans
from natgrad.linalg.products import scaled

if TYPE_CHECKING:
    from natgrad.inverses.base import Inverse, Parts


@dataclass(frozen=True)
class DecomposedFactor:
    """One factor ``[b, d, d]`` after its decomposition; only ``inverse`` looks into the parts.

    Arguments:
        inverse: what decomposed it.
        parts: what ``decompose`` or ``decompose_diagonal`` gave, tensors with a leading ``b``.
        dim: ``d``.
        diagonal: whether the factor is a diagonal one; its parts are the same for all inverses that
            damp factors, ``1 / (values + damping) [b, d]``.
        sections: ``(count, size)`` of diagonal blocks, where nothing else of the factor is kept;
            the parts of the blocks of one size, ``[b * count, …]``, stand before those of the next.
    """

    inverse: "Inverse"
    parts: "Parts"
    dim: int
    diagonal: bool = False
    sections: Sections = ()

    def in_sections(self) -> Iterator[tuple[slice, int, "DecomposedFactor"]]:
        """The blocks of one size as a factor ``[b * count, size, size]``, with their columns and
        with ``count``."""
        own = len(self.parts) // len(self.sections)
        for index, (first, end, count, size) in enumerate(spans(self.sections)):
            parts = self.parts[index * own : (index + 1) * own]
            yield slice(first, end), count, DecomposedFactor(self.inverse, parts, size)

    def part(self, part: slice) -> "DecomposedFactor":
        """Some entries of a diagonal factor.

        Arguments:
            part: which ones.
        """
        assert self.diagonal
        parts = tuple(one[:, part] for one in self.parts)
        return DecomposedFactor(self.inverse, parts, part.stop - part.start, diagonal=True)

    def explicit(self) -> Matrix | None:
        """The damped inverse ``[b, d, d]``, ``[b, d]`` of a diagonal one, if it is kept as such."""
        if self.sections:
            found = []
            for _, count, factor in self.in_sections():
                inverse = factor.explicit()
                if not isinstance(inverse, Tensor):
                    return None
                found.append(inverse.unflatten(0, (-1, count)))
            return BlockDiagonal(found)
        return self.parts[0] if self.diagonal else self.inverse.explicit(self.parts)

    def power(self, m: Tensor, exponent: float) -> Tensor:
        """``(factor + damping I)^exponent m``, with the damping of the decomposition; a
        `Diagonalization` has none there.

        Arguments:
            m: ``[b, d, k]``.
            exponent: -1 is the inverse, -1/2 its root, 1 the damped factor itself.
        """
        if self.diagonal:
            inverse = self.parts[0]
            return scaled(inverse if exponent == -1 else inverse.pow(-exponent), m)
        if self.sections:
            out = torch.empty_like(m)
            for columns, count, factor in self.in_sections():
                pieces = m[:, columns].unflatten(1, (count, factor.dim))
                found = factor.power(pieces.flatten(0, 1).contiguous(), exponent)
                out[:, columns] = found.unflatten(0, (-1, count)).flatten(1, 2)
            return out
        if exponent == -1:
            return self.inverse.solve(self.parts, m)
        return self.inverse.apply_power(self.parts, m, exponent)

    def matrix(self, exponent: float) -> Matrix:
        """The same power as a matrix ``[b, d, d]``, or its diagonal ``[b, d]`` where it is one.

        Arguments:
            exponent: as for `power`.
        """
        first = self.parts[0]
        if self.diagonal:
            return first.pow(-exponent)
        if self.sections:
            found = []
            for _, count, factor in self.in_sections():
                power = factor.matrix(exponent)
                assert isinstance(power, Tensor)
                found.append(power.unflatten(0, (-1, count)))
            return BlockDiagonal(found)
        eye = torch.eye(self.dim, dtype=first.dtype, device=first.device)
        return self.power(eye.expand(len(first), -1, -1), exponent)

    def power_rows(self, m: Tensor, exponent: float) -> Tensor:
        """``m (factor + damping I)^exponent``.

        Arguments:
            m: ``[b, k, d]``.
            exponent: as for `power`.
        """
        return self.power(m.mT.contiguous(), exponent).mT


def solved_rows(factor: DecomposedFactor | None, rows: Tensor) -> Tensor:
    """``rows (factor + damping I)^-1``.

    Arguments:
        factor: of one matrix; ``None`` is the identity.
        rows: ``[k, d]``, or ``[k, d - 1]`` with a 1 behind.
    """
    if factor is None:
        return rows
    inverse = factor.explicit()
    if isinstance(inverse, Tensor) and inverse.ndim == 3:
        if rows.shape[1] == inverse.shape[1]:
            return rows @ inverse[0]
        # The constant 1 multiplies the last row; it is never written out beside the activations.
        return torch.addmm(inverse[0, -1], rows, inverse[0, :-1])
    if rows.shape[1] < factor.dim:
        rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
    if isinstance(inverse, BlockDiagonal):
        return inverse.right_of(rows.unsqueeze(0))[0]
    return factor.power_rows(rows.unsqueeze(0), -1.0)[0]


def spectrum(factor: DecomposedFactor) -> tuple[Tensor, Matrix | None]:
    """Eigenvalues ``[b, d]`` and eigenvectors ``[b, d, d]`` of a damped factor. A diagonal one,
    which may be as wide as a vocabulary, needs no vectors.

    Arguments:
        factor: decomposed by an inverse that damps factors.
    """
    if factor.sections:
        values, vectors = [], []
        for _, count, one in factor.in_sections():
            found, rows = spectrum(one)
            assert isinstance(rows, Tensor)
            values.append(found.unflatten(0, (-1, count)).flatten(1))
            vectors.append(rows.unflatten(0, (-1, count)))
        return torch.cat(values, 1), BlockDiagonal(vectors)
    if factor.diagonal:
        return factor.parts[0].reciprocal(), None
    values, vectors = torch.linalg.eigh(factor.inverse.dense(factor.parts, factor.dim))
    return values.reciprocal(), vectors
