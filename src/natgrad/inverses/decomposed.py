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

from torch import Tensor

from natgrad.damping import Damping
from natgrad.inverses.factor import DecomposedFactor, solved_rows, spectrum
from natgrad.inverses.functions import DampedPower, Function
from natgrad.linalg.block_diagonal import BlockDiagonal, Matrix
from natgrad.linalg.products import sandwiched, scaled
from natgrad.specs import AppliedRoom

Sides = tuple[Matrix | None, Matrix | None]


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

    def apply_part(
        self, function: Function, m: Tensor, axis: int, part: slice, out: Tensor
    ) -> Tensor:
        """The same for some rows or columns of a matrix, along which the block is a diagonal.

        Arguments:
            function: of the eigenvalues of the whole block.
            m: ``[b, rows, cols]``, of which only those rows or columns are there.
            axis: 1 for rows, 2 for columns.
            part: which ones.
            out: like ``m``, where the result is written.
        """
        raise NotImplementedError(f"{type(self).__name__} has no factors that are diagonals")

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

    def sides(self, power: float, damping: Damping, squared: int | None = None) -> Sides | None:
        """The matrices that ``whiten`` multiplies with from the left and from the right, of a
        product of two factors; ``None`` of other blocks. They are kept until the factors change.

        Arguments:
            power: as for ``whiten``.
            damping: as for ``whiten``.
            squared: 1 or 2 for the left or the right one squared; ``None`` for both as they are.
        """
        return None

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
            values, vectors = spectrum(self.factor)
            assert not isinstance(vectors, BlockDiagonal)  # pieces are blocks already
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
        self._whitens: tuple[float, int | None] | None = None
        self._roots: Sides = (None, None)

    def apply(self, function: Function, m: Tensor, out: Tensor | None = None) -> Tensor:
        if not isinstance(function, DampedPower):
            found = self._spectral(function, m)
        elif function.exponent == -1 and self._explicit:
            g, a = (None if f is None else f.explicit() for f in (self.g, self.a))
            return sandwiched(g, m, a, out)
        else:
            found = self._power(m, function.exponent)
        return found if out is None else out.copy_(found)

    def apply_part(
        self, function: Function, m: Tensor, axis: int, part: slice, out: Tensor
    ) -> Tensor:
        g = self.g.part(part) if axis == 1 and self.g is not None else self.g
        a = self.a.part(part) if axis == 2 and self.a is not None else self.a
        return FactorProduct(g, a).apply(function, m, out)

    def multiply(self, m: Tensor, damping: Damping) -> Tensor:
        return self._power(m, 1.0)

    def whiten(
        self, m: Tensor, power: float, damping: Damping, out: Tensor | None = None
    ) -> Tensor:
        """The root of each side is kept as a matrix until the factors change."""
        left, right = self.sides(power, damping)
        return sandwiched(left, m, right, out)

    def sides(self, power: float, damping: Damping, squared: int | None = None) -> Sides:
        if self._whitens != (power, squared):
            left, right = (
                None
                if factor is None
                else factor.matrix(-power if squared == place else -power / 2)
                for place, factor in ((1, self.g), (2, self.a))
            )
            self._whitens, self._roots = (power, squared), (left, right)
        return self._roots

    def along_inputs(self, m: Tensor) -> Tensor | None:
        return None if self.a is None else self.a.power_rows(m, 1.0)

    def outer(self, g: Tensor, a: Tensor) -> tuple[Tensor, Tensor] | None:
        """Each side by itself: with fewer rows than the layer is wide that is less work."""
        return solved_rows(self.g, g), solved_rows(self.a, a)

    def tensors(self) -> Iterator[Tensor]:
        for root in self._roots:
            yield from numbers_of(root)

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
        lg, qg = (ones, None) if self.g is None else spectrum(self.g)
        la, qa = (ones, None) if self.a is None else spectrum(self.a)
        values = (lg.unsqueeze(2) * la.unsqueeze(1)).expand_as(m)
        rotated = sandwiched(None if qg is None else qg.mT, m, qa) * function(values)
        return sandwiched(qg, rotated, None if qa is None else qa.mT)


def numbers_of(matrix: Matrix | None) -> Iterator[Tensor]:
    """The tensors that a matrix is made of.

    Arguments:
        matrix: dense, a diagonal or in blocks; ``None`` has none.
    """
    if isinstance(matrix, BlockDiagonal):
        yield from matrix.sections
    elif matrix is not None:
        yield matrix
