"""Inverses that know all eigenvalues of a factor, and blocks on which any function can act.

``G x A = (Q_G x Q_A) diag(l_G l_A^T) (Q_G x Q_A)^T``, so that ``f(G x A) M`` is

    Q_G ((Q_G^T M Q_A) * f(l_G l_A^T)) Q_A^T

four products, and with ``f(l) = 1 / (l + damping)`` exactly the damped inverse of the whole block
(Pauloski 2022, eq. 11-13). EKFAC puts eigenvalues of its own in the place of ``l_G l_A^T``.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from natgrad.damping import Damping, Relative
from natgrad.inverses.base import Inverse, Parts
from natgrad.inverses.basis import Bases, Basis
from natgrad.inverses.decomposed import Decomposed, Sides, numbers_of
from natgrad.inverses.factor import DecomposedFactor
from natgrad.inverses.functions import DampedPower, Function, damped, relative
from natgrad.linalg.block_diagonal import BlockDiagonal, Matrix
from natgrad.linalg.eigh import settle_null_spaces
from natgrad.linalg.products import filtered, product, sandwiched, scaled
from natgrad.specs import AppliedRoom, FactorCost, FactorSpec


class Diagonalization(Inverse):
    """Derived classes write ``decompose`` and ``basis``; damping acts when the block is applied."""

    damps_factors: ClassVar[bool] = False

    @abstractmethod
    def basis(self, parts: Parts) -> Basis:
        """Eigenvectors and eigenvalues of a factor.

        Arguments:
            parts: what ``decompose`` or ``decompose_diagonal`` gave.
        """

    def settle(self, parts: Parts) -> None:
        """Make the basis depend on the factor alone, in place, where a structure measures along its
        vectors (`natgrad.linalg.eigh.settle_null_spaces`). Derived classes may leave it as it is.

        Arguments:
            parts: what ``decompose`` gave.
        """
        rows, values = self.basis(parts)
        assert isinstance(rows, Tensor)
        settle_null_spaces(values, rows)

    def basis_of(self, factor: DecomposedFactor) -> Basis:
        """The same of a decomposed factor, of which a diagonal one is in its own basis.

        Arguments:
            factor: decomposed by this inverse.
        """
        if factor.diagonal:
            (values,) = factor.parts
            return Basis(values.new_empty(len(values), 0), values)
        if factor.sections:
            found = [(self.basis(one.parts), count) for _, count, one in factor.in_sections()]
            rows = [b.rows.unflatten(0, (-1, n)) for b, n in found if isinstance(b.rows, Tensor)]
            values = torch.cat([b.values.unflatten(0, (-1, n)).flatten(1) for b, n in found], 1)
            return Basis(BlockDiagonal(rows), values)
        return self.basis(factor.parts)

    def solve(self, parts: Parts, m: Tensor) -> Tensor:
        return self.apply_power(parts, m, -1.0)

    def apply_power(self, parts: Parts, m: Tensor, exponent: float) -> Tensor:
        """Without any damping."""
        rows, values = self.basis(parts)
        return _filtered_columns(rows, DampedPower(exponent)(values), m)

    def error(self, parts: Parts, matrix: Tensor, damping: Tensor) -> Tensor:
        """``|Q^T F Q - diag| / |F|``: what is left beside the diagonal in the old basis."""
        rows, _ = self.basis(parts)
        assert isinstance(rows, Tensor)
        rotated = rows @ matrix @ rows.mT
        total = rotated.norm()
        beside = rotated - torch.diag_embed(rotated.diagonal(dim1=1, dim2=2))
        error: Tensor = beside.norm() / total.clamp(min=1e-30)
        return error

    def diagonal_error(self, parts: Parts, values: Tensor, damping: Tensor) -> Tensor:
        """There is nothing to rotate: how far the values themselves have moved."""
        moved: Tensor = (values - parts[0]).norm() / values.norm().clamp(min=1e-30)
        return moved

    def cost(self, spec: FactorSpec) -> FactorCost:
        """An eigendecomposition, and a product there and one back for each side."""
        return replace(spec, cost=None).work

    def decompose_diagonal(self, values: Tensor, damping: Tensor) -> Parts:
        """The values alone: they are the eigenvalues already."""
        return (values.clamp(min=0.0),)

    def blocks(self, factor: DecomposedFactor) -> Decomposed:
        return SpectralBlocks(self.basis_of(factor))

    def kronecker(self, g: DecomposedFactor | None, a: DecomposedFactor | None) -> Decomposed:
        return self._product(g, a, None)

    def rotated(self, g: DecomposedFactor, a: DecomposedFactor, values: Tensor) -> Decomposed:
        return self._product(g, a, values)

    def _product(
        self, g: DecomposedFactor | None, a: DecomposedFactor | None, values: Tensor | None
    ) -> "SpectralProduct":
        copies = any(f is not None and f.sections for f in (g, a))
        # A closure would not be copied with what it holds.
        again = partial(self._bases, g, a) if copies else None
        return SpectralProduct(*self._bases(g, a), values, again)

    def _bases(self, g: DecomposedFactor | None, a: DecomposedFactor | None) -> Bases:
        left, right = (None if f is None else self.basis_of(f) for f in (g, a))
        return left, right


class SpectralBlocks(Decomposed):
    """One factor over pieces of ``vec(W)``.

    Arguments:
        basis: of as many matrices as there are pieces.
    """

    def __init__(self, basis: Basis) -> None:
        self.basis = basis

    def apply(self, function: Function, m: Tensor, out: Tensor | None = None) -> Tensor:
        rows, values = self.basis
        pieces = m.reshape(len(values), -1, 1)
        found = _filtered_columns(rows, function(values), pieces).view(m.shape)
        return found if out is None else out.copy_(found)

    def multiply(self, m: Tensor, damping: Damping) -> Tensor:
        return self.apply(lambda values: damped(values, damping), m)

    def rotate(self, m: Tensor) -> Tensor:
        return self._turned(self.basis.rows, m)

    def rotate_back(self, m: Tensor) -> Tensor:
        return self._turned(self.basis.rows.mT, m)

    def _turned(self, rows: Matrix, m: Tensor) -> Tensor:
        if self.basis.is_identity:
            return m.clone()
        assert isinstance(rows, Tensor)  # pieces are blocks already
        return (rows @ m.reshape(len(rows), -1, 1)).view(m.shape)

    def tensors(self) -> Iterator[Tensor]:
        return iter(())

    def room(self, numel: int) -> AppliedRoom:
        return AppliedRoom(passing=3 * numel)


class SpectralProduct(Decomposed):
    """A block in the eigenbasis ``Q_G x Q_A`` of two factors.

    What a function makes of all eigenvalues is kept until the function or the parts change.

    Arguments:
        g: of the factor over rows; ``None`` is the identity.
        a: of the factor over columns; ``None`` is the identity, though not of both.
        values: ``[b, rows * cols]``, eigenvalues in that basis; ``None`` is ``l_G l_A^T``.
        again: gives both bases after the parts were overwritten, where they are no views of them,
            as eigenvalues of blocks of several sizes; ``None`` where they are.
    """

    def __init__(
        self,
        g: Basis | None,
        a: Basis | None,
        values: Tensor | None = None,
        again: Callable[[], Bases] | None = None,
    ) -> None:
        self.g, self.a, self.given, self._again = g, a, values, again
        self._function: Function | None = None
        self._scale: Tensor | None = None
        self._whitens: tuple[float, Damping, int | None] | None = None
        self._roots: Sides = (None, None)

    def values(self, shape: torch.Size) -> Tensor:
        """All eigenvalues, in that shape.

        Arguments:
            shape: ``[b, rows, cols]``.
        """
        if self.given is not None:
            return self.given.view(shape)
        if self.g is not None and self.a is not None:
            return self.g.values.unsqueeze(2) * self.a.values.unsqueeze(1)
        if self.g is not None:
            return self.g.values.unsqueeze(2).expand(shape)
        assert self.a is not None
        return self.a.values.unsqueeze(1).expand(shape)

    def apply(self, function: Function, m: Tensor, out: Tensor | None = None) -> Tensor:
        if self._scale is None or self._function != function:
            self._scale = None  # before there is a new one
            self._function, self._scale = function, function(self.values(m.shape))
        return self._filtered(m, self._scale, out)

    def apply_part(
        self, function: Function, m: Tensor, axis: int, part: slice, out: Tensor
    ) -> Tensor:
        g = _part(self.g, part) if axis == 1 else self.g
        a = _part(self.a, part) if axis == 2 else self.a
        given = None
        if self.given is not None and self.g is not None:  # [b, rows, cols], of which some
            given = self.given.view(len(m), self.g.values.shape[1], -1)
            given = (given[:, part] if axis == 1 else given[:, :, part]).flatten(1)
        some = SpectralProduct(g, a, given)
        if isinstance(function, DampedPower):
            scale = function.of_part(some.values(m.shape), self._summary())
        else:
            scale = function(some.values(m.shape))
        return some._filtered(m, scale, out)

    def _summary(self) -> Tensor:
        """Numbers ``[b, n]`` with the mean and the largest of all eigenvalues."""
        if self.given is not None:
            return self.given
        sides = [side.values for side in (self.g, self.a) if side is not None]
        mean = torch.stack([values.mean(1) for values in sides]).prod(0)
        most = torch.stack([values.amax(1) for values in sides]).prod(0)
        return torch.stack([most, 2 * mean - most], 1)

    def multiply(self, m: Tensor, damping: Damping) -> Tensor:
        return self._filtered(m, damped(self.values(m.shape), damping))

    def rotate(self, m: Tensor) -> Tensor:
        g, a = (None if side is None or side.is_identity else side.rows for side in self._sides)
        return sandwiched(g, m, None if a is None else a.mT)

    def rotate_back(self, m: Tensor) -> Tensor:
        g, a = (None if side is None or side.is_identity else side.rows for side in self._sides)
        return sandwiched(None if g is None else g.mT, m, a)

    def along_inputs(self, m: Tensor) -> Tensor | None:
        if self.a is None:
            return None
        if self.a.is_identity:
            return m * self.a.values.unsqueeze(1)
        if isinstance(self.a.rows, BlockDiagonal):
            turned = self.a.rows.mT.right_of(m) * self.a.values.unsqueeze(1)
            return self.a.rows.right_of(turned)
        return (m @ self.a.rows.mT * self.a.values.unsqueeze(1)) @ self.a.rows

    @property
    def _sides(self) -> tuple[Basis | None, Basis | None]:
        return self.g, self.a

    def whiten(
        self, m: Tensor, power: float, damping: Damping, out: Tensor | None = None
    ) -> Tensor:
        """Each side by a root of its own, which is kept as a matrix: two products a call.

        The damping is split as for inverses of single factors, ``pi sqrt(damping)`` for A and
        ``sqrt(damping) / pi`` for G with ``pi^2 = mean(l_A) / mean(l_G)``; a `Relative` one is a
        share of each factor's own mean. Eigenvalues that are no product have no such sides.
        """
        sides = self.sides(power, damping)
        if sides is None:
            return super().whiten(m, power, damping, out)
        return sandwiched(sides[0], m, sides[1], out)

    def sides(self, power: float, damping: Damping, squared: int | None = None) -> Sides | None:
        if self.given is not None or self.g is None or self.a is None:
            return None
        if self._whitens != (power, damping, squared):
            added = _split(self.g.values, self.a.values, damping)
            self._roots = (None, None)  # before there are new ones
            left, right = (
                Basis(basis.rows, basis.values + own).root(
                    DampedPower(-power if squared == place else -power / 2)
                )
                for place, basis, own in zip((1, 2), (self.g, self.a), added, strict=True)
            )
            self._whitens, self._roots = (power, damping, squared), (left, right)
        return self._roots

    def _filtered(self, m: Tensor, scale: Tensor, out: Tensor | None = None) -> Tensor:
        empty = m.new_empty(0)
        rows_g: Matrix = empty if self.g is None else self.g.rows
        rows_a: Matrix = empty if self.a is None else self.a.rows
        return filtered(rows_g, rows_a, m, scale, torch.empty_like(m) if out is None else out)

    def room(self, numel: int) -> AppliedRoom:
        """What a function makes of all eigenvalues, and two products. The eigenvalues themselves
        and their damped sums are there while it is made."""
        passing = numel if self.given is not None else 2 * numel
        return AppliedRoom(prepared=numel, scratch=2 * numel, passing=passing)

    def tensors(self) -> Iterator[Tensor]:
        for matrix in (self._scale, *self._roots):
            yield from numbers_of(matrix)

    def forget(self) -> None:
        self._function = self._scale = self._whitens = None
        self._roots = (None, None)
        if self._again is not None:
            self.g, self.a = self._again()


def _part(basis: Basis | None, part: slice) -> Basis | None:
    """Some entries of a diagonal factor."""
    return None if basis is None else Basis(basis.rows, basis.values[:, part])


def _split(lg: Tensor, la: Tensor, damping: Damping) -> tuple[Tensor, Tensor]:
    """The damping ``[b, 1]`` of G and of A, by their eigenvalues ``[b, d]``."""
    g, a = lg.mean(1, keepdim=True), la.mean(1, keepdim=True)
    if isinstance(damping, Relative):
        return relative(damping, g), relative(damping, a)
    pi = torch.where((a > 0) & (g > 0), a / g, torch.ones_like(a)).sqrt()
    return damping**0.5 / pi, damping**0.5 * pi


def _filtered_columns(rows: Matrix, scale: Tensor, m: Tensor) -> Tensor:
    """``Q diag(scale) Q^T m`` for ``m [b, d, k]``."""
    if rows.numel() == 0:
        return scaled(scale, m)
    rotated = scaled(scale, product(rows, m, torch.empty_like(m)))
    return product(rows.mT, rotated, torch.empty_like(m))
