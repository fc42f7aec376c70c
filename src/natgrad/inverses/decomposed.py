"""A block of the curvature matrix after its factors were decomposed: one object that applies it.

    structure.decompose(kept, forms, inverse, damping) -> Decomposed
    decomposed.apply(DampedPower(-1, damping), m)      -> (F + damping I)^-1 m
    decomposed.whiten(m, power, damping)               -> coordinates in which F^power is I

Two pairs of choices meet here. A structure says how many factors a block has: one that holds all of
it (``blocks``: full, unit-wise, diagonal), or two that it is the product of (``kronecker``). An
inverse says what is known of a decomposed factor: its inverse alone (`FactorBlocks`,
`FactorProduct`, in this file), or all eigenvalues (`SpectralBlocks`, `SpectralProduct`). Neither
sees the other's insides, so that an inverse of one's own works in every structure, and a structure
of one's own with every inverse.

Tensors in here may be overwritten by the next decomposition of the same factors; ``forget`` then
drops what was computed from them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from natgrad.damping import Damping
from natgrad.inverses.functions import DampedPower, Function
from natgrad.linalg.products import scaled, two_sided
from natgrad.specs import AppliedRoom

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
    """

    inverse: "Inverse"
    parts: "Parts"
    dim: int
    diagonal: bool = False

    def explicit(self) -> Tensor | None:
        """The damped inverse ``[b, d, d]``, ``[b, d]`` of a diagonal one, if it is kept as such."""
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
        if exponent == -1:
            return self.inverse.solve(self.parts, m)
        return self.inverse.apply_power(self.parts, m, exponent)

    def matrix(self, exponent: float) -> Tensor:
        """The same power as a matrix ``[b, d, d]``, or its diagonal ``[b, d]`` where it is one.

        Arguments:
            exponent: as for `power`.
        """
        first = self.parts[0]
        if self.diagonal:
            return first.pow(-exponent)
        eye = torch.eye(self.dim, dtype=first.dtype, device=first.device)
        return self.power(eye.expand(len(first), -1, -1), exponent)

    def power_rows(self, m: Tensor, exponent: float) -> Tensor:
        """``m (factor + damping I)^exponent``.

        Arguments:
            m: ``[b, k, d]``.
            exponent: as for `power`.
        """
        return self.power(m.mT.contiguous(), exponent).mT


class Decomposed(ABC):
    """The block of a weight ``[b, rows, cols]``, or of ``b`` of them that are stacked."""

    @abstractmethod
    def apply(self, function: Function, m: Tensor, out: Tensor | None = None) -> Tensor:
        """A function of the block times a matrix.

        Arguments:
            function: of eigenvalues, such as `DampedPower`. Where each factor was damped before it
                was decomposed, that damping stays and the function's own one is not added.
            m: ``[b, rows, cols]``.
            out: ``[b, rows, cols]``, where the result is written; ``None`` makes a new tensor.
        """

    @abstractmethod
    def multiply(self, m: Tensor, damping: Damping) -> Tensor:
        """``(block + damping I) m``: what ``apply(DampedPower(-1, damping), ...)`` inverts.

        Arguments:
            m: ``[b, rows, cols]``.
            damping: of the block; not added where each factor has its own already.
        """

    def whiten(
        self, m: Tensor, power: float, damping: Damping, out: Tensor | None = None
    ) -> Tensor:
        """Coordinates in which ``F^power`` is the identity: ``F^(-power/2) m``, damped.

        For a product of two factors both sides are whitened by themselves,
        ``G^(-power/2) m A^(-power/2)``. The map is symmetric: the same call brings a step that was
        found in these coordinates back to the weights.

        Arguments:
            m: ``[b, rows, cols]``.
            power: 1 whitens by the curvature itself, 0 changes nothing.
            damping: as for ``apply``; of a product each factor gets its share.
            out: ``[b, rows, cols]``, where the result is written; ``None`` makes a new tensor.
        """
        return self.apply(DampedPower(-power / 2, damping), m, out)

    def rotate(self, m: Tensor) -> Tensor:
        """Coordinates in the eigenbasis of the block, of those inverses that have one.

        Arguments:
            m: ``[b, rows, cols]``.
        """
        raise NotImplementedError(f"{type(self).__name__} has no eigenbasis")

    def rotate_back(self, m: Tensor) -> Tensor:
        """From coordinates in the eigenbasis to those of the weight.

        Arguments:
            m: ``[b, rows, cols]``.
        """
        raise NotImplementedError(f"{type(self).__name__} has no eigenbasis")

    def along_inputs(self, m: Tensor) -> Tensor | None:
        """``m A`` with the second moments of the inputs; ``None`` where these are not known. An
        inverse that damps factors has its damping in ``A``.

        Arguments:
            m: ``[b, rows, cols]``.
        """
        return None

    def outer(self, g: Tensor, a: Tensor) -> tuple[Tensor, Tensor] | None:
        """The damped inverse of the matrix ``g^T a``, as such a product again; ``None`` where that
        is not possible.

        Arguments:
            g: ``[k, rows]``.
            a: ``[k, cols]``, or ``[k, cols - 1]``: a constant 1 is then the last column.
        """
        return None

    @abstractmethod
    def tensors(self) -> Iterator[Tensor]:
        """What is kept beside the parts until they, or the damping, change."""

    def room(self, numel: int) -> AppliedRoom:
        """What ``apply`` takes in numbers, for the planner.

        Arguments:
            numel: of the weight.
        """
        return AppliedRoom(passing=2 * numel)

    def forget(self) -> None:
        """The parts have been overwritten: drop what was computed from them."""
        return


class FactorBlocks(Decomposed):
    """One factor over pieces of ``vec(W)``, ``[pieces, d, d]``, damped when it was decomposed.

    Arguments:
        factor: whose matrices are as many as there are pieces.
    """

    def __init__(self, factor: DecomposedFactor) -> None:
        self.factor, self.pieces = factor, len(factor.parts[0])

    def apply(self, function: Function, m: Tensor, out: Tensor | None = None) -> Tensor:
        if isinstance(function, DampedPower):
            found = self._power(m, function.exponent)
        else:
            values, vectors = _spectrum(self.factor)
            found = self._cut(m) if vectors is None else vectors.mT @ self._cut(m)
            found = scaled(function(values), found)
            found = (found if vectors is None else vectors @ found).view(m.shape)
        return found if out is None else out.copy_(found)

    def multiply(self, m: Tensor, damping: Damping) -> Tensor:
        return self._power(m, 1.0)

    def room(self, numel: int) -> AppliedRoom:
        return AppliedRoom(passing=numel)

    def _power(self, m: Tensor, exponent: float) -> Tensor:
        return self.factor.power(self._cut(m), exponent).reshape(m.shape)

    def _cut(self, m: Tensor) -> Tensor:
        return m.reshape(self.pieces, -1, 1)

    def tensors(self) -> Iterator[Tensor]:
        return iter(())


class FactorProduct(Decomposed):
    """``G x A``, each damped when it was decomposed.

    Kept as explicit inverses, both are multiplied with at once: half the products of a spectrum.

    Arguments:
        g: the factor over rows; ``None`` is the identity.
        a: the factor over columns; ``None`` is the identity.
    """

    def __init__(self, g: DecomposedFactor | None, a: DecomposedFactor | None) -> None:
        self.g, self.a = g, a
        self._explicit = all(f is None or f.explicit() is not None for f in (g, a))
        self._whitens: float | None = None
        self._roots: tuple[Tensor | None, Tensor | None] = (None, None)

    def apply(self, function: Function, m: Tensor, out: Tensor | None = None) -> Tensor:
        if not isinstance(function, DampedPower):
            found = self._spectral(function, m)
        elif function.exponent == -1 and self._explicit:
            g, a = (None if f is None else f.explicit() for f in (self.g, self.a))
            return sandwiched(g, m, a, out)
        else:
            found = self._power(m, function.exponent)
        return found if out is None else out.copy_(found)

    def multiply(self, m: Tensor, damping: Damping) -> Tensor:
        return self._power(m, 1.0)

    def whiten(
        self, m: Tensor, power: float, damping: Damping, out: Tensor | None = None
    ) -> Tensor:
        """The root of each side is kept as a matrix until the factors change."""
        if self._whitens != power:
            left, right = (None if f is None else f.matrix(-power / 2) for f in (self.g, self.a))
            self._whitens, self._roots = power, (left, right)
        left, right = self._roots
        return sandwiched(left, m, right, out)

    def along_inputs(self, m: Tensor) -> Tensor | None:
        return None if self.a is None else self.a.power_rows(m, 1.0)

    def outer(self, g: Tensor, a: Tensor) -> tuple[Tensor, Tensor] | None:
        """Each side by itself: with fewer rows than the layer is wide that is less work."""
        return _solved_rows(self.g, g), _solved_rows(self.a, a)

    def tensors(self) -> Iterator[Tensor]:
        yield from (root for root in self._roots if root is not None)

    def forget(self) -> None:
        self._whitens, self._roots = None, (None, None)

    def room(self, numel: int) -> AppliedRoom:
        """Explicit inverses of both sides need one product between them."""
        if not self._explicit:
            return super().room(numel)
        sides = [f for f in (self.g, self.a) if f is not None and not f.diagonal]
        return AppliedRoom(scratch=numel if len(sides) == 2 else 0)

    def _power(self, m: Tensor, exponent: float) -> Tensor:
        m = m if self.g is None else self.g.power(m, exponent)
        return m if self.a is None else self.a.power_rows(m, exponent)

    def _spectral(self, function: Function, m: Tensor) -> Tensor:
        """By eigenvalues that are computed for it: slow, for functions that are no power."""
        ones = m.new_ones(len(m), 1)  # the eigenvalues of an identity
        lg, qg = (ones, None) if self.g is None else _spectrum(self.g)
        la, qa = (ones, None) if self.a is None else _spectrum(self.a)
        values = (lg.unsqueeze(2) * la.unsqueeze(1)).expand_as(m)
        rotated = sandwiched(None if qg is None else qg.mT, m, qa) * function(values)
        return sandwiched(qg, rotated, None if qa is None else qa.mT)


def sandwiched(
    left: Tensor | None, m: Tensor, right: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """``left m right``.

    Arguments:
        left: ``[b, r, r]``, a diagonal ``[b, r]``, or ``None`` for the identity.
        m: ``[b, r, c]``.
        right: ``[b, c, c]``, ``[b, c]``, or ``None``.
        out: ``[b, r, c]``, where the result is written; ``None`` makes a new tensor.
    """
    empty = m.new_empty(0)
    first, last = (empty if side is None or side.ndim == 2 else side for side in (left, right))
    out = two_sided(first, m, last, torch.empty_like(m) if out is None else out)
    if left is not None and left.ndim == 2:
        out *= left.unsqueeze(2)
    if right is not None and right.ndim == 2:
        out *= right.unsqueeze(1)
    return out


def _solved_rows(factor: DecomposedFactor | None, rows: Tensor) -> Tensor:
    """``rows (factor + damping I)^-1`` for ``rows [k, d]``, or ``[k, d - 1]`` with a 1 behind."""
    if factor is None:
        return rows
    inverse = factor.explicit()
    if inverse is not None and inverse.ndim == 3:
        if rows.shape[1] == inverse.shape[1]:
            return rows @ inverse[0]
        # The constant 1 multiplies the last row; it is never written out beside the activations.
        return torch.addmm(inverse[0, -1], rows, inverse[0, :-1])
    if rows.shape[1] < factor.dim:
        rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
    return factor.power_rows(rows.unsqueeze(0), -1.0)[0]


def _spectrum(factor: DecomposedFactor) -> tuple[Tensor, Tensor | None]:
    """Eigenvalues ``[b, d]`` and eigenvectors ``[b, d, d]`` of a damped factor. A diagonal one,
    which may be as wide as a vocabulary, needs no vectors."""
    if factor.diagonal:
        return factor.parts[0].reciprocal(), None
    values, vectors = torch.linalg.eigh(factor.inverse.dense(factor.parts, factor.dim))
    return values.reciprocal(), vectors
