"""Symmetric matrices over ``vec(W)`` that are never written out.

    DenseBlocks        blocks on the diagonal           DiagonalMatrix   a diagonal
    KroneckerProduct   ``G x A``                        Rotated          ``Q diag(S) Q^T``

with ``Q = Q_G x Q_A``. Every one of them knows its eigenvalues in closed form, so that any function
of it is exact: ``f(F) m = Q f(l) Q^T m``. ``Structure.matrix`` makes them from kept factors, for
structured operators and, independently of the fast path, as the oracle in tests of the
preconditioner. Vectors are rows: ``m [k, size]``.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import TypeGuard

import torch
from torch import Tensor

from natgrad.linalg.block_diagonal import BlockDiagonal, Matrix
from natgrad.linalg.eigh import eigh

Function = Callable[[Tensor], Tensor]  # of eigenvalues, entry by entry


class Symmetric(ABC):
    size: int

    @abstractmethod
    def product(self, m: Tensor) -> Tensor:
        """``m [k, size]`` -> ``[k, size]``."""

    @abstractmethod
    def apply(self, function: Function, m: Tensor) -> Tensor:
        """``f(matrix) m`` for ``m [k, size]``."""

    @abstractmethod
    def eigenvalues(self) -> Tensor:
        """``[size]``, in no order."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """``[size]``."""

    @abstractmethod
    def eigenvectors(self, which: Tensor) -> Tensor:
        """Of ``eigenvalues()[which]``, as rows ``[k, size]``."""

    def trace(self) -> Tensor:
        return self.diagonal().sum()

    def square_norm(self) -> Tensor:
        return self.eigenvalues().square().sum()

    def dense(self) -> Tensor:
        """``[size, size]``."""
        one = self.diagonal()
        return self.product(torch.eye(self.size, dtype=one.dtype, device=one.device))


class DenseBlocks(Symmetric):
    """``values [b, d, d]`` along the diagonal."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self.blocks, self.dim, _ = values.shape
        self.size = self.blocks * self.dim

    @cached_property
    def _eigen(self) -> tuple[Tensor, Tensor]:
        return _eigh(self.values)

    def product(self, m: Tensor) -> Tensor:
        return self._each(lambda x: self.values @ x, m)

    def apply(self, function: Function, m: Tensor) -> Tensor:
        values, vectors = self._eigen
        scale = function(values).unsqueeze(-1)
        return self._each(lambda x: vectors @ (scale * (vectors.mT @ x)), m)

    def eigenvalues(self) -> Tensor:
        return self._eigen[0].flatten()

    def eigenvectors(self, which: Tensor) -> Tensor:
        out = self.values.new_zeros(len(which), self.blocks, self.dim)
        block, column = which // self.dim, which % self.dim
        out[torch.arange(len(which), device=which.device), block] = self._eigen[1][block, :, column]
        return out.flatten(1)

    def diagonal(self) -> Tensor:
        return self.values.diagonal(dim1=1, dim2=2).flatten()

    def square_norm(self) -> Tensor:
        return self.values.square().sum()

    def dense(self) -> Tensor:
        out: Tensor = torch.block_diag(*self.values)
        return out

    def _each(self, function: Function, m: Tensor) -> Tensor:
        """``function`` on ``[b, d, k]``."""
        pieces = m.view(len(m), self.blocks, self.dim).permute(1, 2, 0)
        return function(pieces).permute(2, 0, 1).reshape(m.shape)


class DiagonalMatrix(Symmetric):
    def __init__(self, values: Tensor) -> None:
        self.values, self.size = values, values.numel()

    def product(self, m: Tensor) -> Tensor:
        return self.values * m

    def apply(self, function: Function, m: Tensor) -> Tensor:
        return function(self.values) * m

    def eigenvalues(self) -> Tensor:
        return self.values

    def eigenvectors(self, which: Tensor) -> Tensor:
        out = self.values.new_zeros(len(which), self.size)
        out[torch.arange(len(which), device=which.device), which] = 1.0
        return out

    def diagonal(self) -> Tensor:
        return self.values

    def dense(self) -> Tensor:
        return torch.diag(self.values)


class _TwoSided(Symmetric):
    """Over ``m [b, rows, cols]``, with eigenvectors ``Q_G x Q_A``."""

    groups: int
    rows: int
    cols: int

    @abstractmethod
    def bases(self) -> tuple[Matrix | None, Matrix | None]:
        """``Q_G [b, r, r]`` and ``Q_A [b, c, c]``, ``None`` for the identity."""

    @abstractmethod
    def _values(self) -> Tensor:
        """``[b, r, c]``."""

    def apply(self, function: Function, m: Tensor) -> Tensor:
        q_g, q_a = self.bases()
        x = m.view(-1, self.groups, self.rows, self.cols)
        rotated = _sandwich(None if q_g is None else q_g.mT, x, q_a) * function(self._values())
        out = _sandwich(q_g, rotated, None if q_a is None else q_a.mT)
        return out.reshape(m.shape)

    def eigenvalues(self) -> Tensor:
        return self._values().flatten()

    def eigenvectors(self, which: Tensor) -> Tensor:
        q_g, q_a = self.bases()
        one = self._values()
        x = one.new_zeros(len(which), one.numel())
        x[torch.arange(len(which), device=which.device), which] = 1.0
        x = x.view(-1, self.groups, self.rows, self.cols)
        return _sandwich(q_g, x, None if q_a is None else q_a.mT).flatten(1)


class KroneckerProduct(_TwoSided):
    """``g x a``, each ``[b, d, d]``, in blocks or dense, or ``[b, d]`` for a diagonal factor."""

    def __init__(self, g: Matrix, a: Matrix) -> None:
        self.g, self.a = g, a
        self.groups, self.rows, self.cols = g.shape[0], g.shape[-1], a.shape[-1]
        self.size = self.groups * self.rows * self.cols

    @cached_property
    def _eigen(self) -> tuple[tuple[Tensor, Matrix | None], tuple[Tensor, Matrix | None]]:
        g, a = (_spectrum(f) for f in (self.g, self.a))
        return g, a

    def bases(self) -> tuple[Matrix | None, Matrix | None]:
        return self._eigen[0][1], self._eigen[1][1]

    def _values(self) -> Tensor:
        return self._eigen[0][0].unsqueeze(2) * self._eigen[1][0].unsqueeze(1)

    def product(self, m: Tensor) -> Tensor:
        x = m.view(-1, self.groups, self.rows, self.cols)
        g, a = self.g, self.a
        x = x * g.unsqueeze(2) if _is_diagonal(g) else _sandwich(g, x, None)
        x = x * a.unsqueeze(1) if _is_diagonal(a) else _sandwich(None, x, a)
        return x.reshape(m.shape)

    def diagonal(self) -> Tensor:
        g, a = (_diagonal(f) for f in (self.g, self.a))
        return (g.unsqueeze(2) * a.unsqueeze(1)).flatten()

    def square_norm(self) -> Tensor:
        squares = [_square_norms(f) for f in (self.g, self.a)]
        return (squares[0] * squares[1]).sum()


class Rotated(_TwoSided):
    """``values [b, r, c]`` in the basis ``q_g [b, r, r]``, ``q_a [b, c, c]`` of columns."""

    def __init__(self, q_g: Matrix | None, q_a: Matrix | None, values: Tensor) -> None:
        self.q_g, self.q_a, self.values = q_g, q_a, values
        self.groups, self.rows, self.cols = values.shape
        self.size = values.numel()

    def bases(self) -> tuple[Matrix | None, Matrix | None]:
        return self.q_g, self.q_a

    def _values(self) -> Tensor:
        return self.values

    def product(self, m: Tensor) -> Tensor:
        return self.apply(lambda values: values, m)

    def diagonal(self) -> Tensor:
        left = None if self.q_g is None else self.q_g.square()
        right = None if self.q_a is None else self.q_a.square().mT
        return _sandwich(left, self.values, right).flatten()

    def trace(self) -> Tensor:
        return self.values.sum()


def _sandwich(left: Matrix | None, m: Tensor, right: Matrix | None) -> Tensor:
    """``left m right``; ``None`` is the identity."""
    if isinstance(left, BlockDiagonal):
        m = left.left_of(m)
    elif left is not None:
        m = left @ m
    if isinstance(right, BlockDiagonal):
        return right.right_of(m)
    return m if right is None else m @ right


def _is_diagonal(matrix: Matrix) -> TypeGuard[Tensor]:
    return matrix.ndim == 2


def _diagonal(matrix: Matrix) -> Tensor:
    """``[b, d]``."""
    if isinstance(matrix, BlockDiagonal):
        return matrix.diagonal()
    return matrix if matrix.ndim == 2 else matrix.diagonal(dim1=1, dim2=2)


def _square_norms(matrix: Matrix) -> Tensor:
    """``[b]``."""
    if isinstance(matrix, BlockDiagonal):
        return torch.stack([s.square().flatten(1).sum(1) for s in matrix.sections]).sum(0)
    return matrix.square().flatten(1).sum(1)


def _spectrum(matrix: Matrix) -> tuple[Tensor, Matrix | None]:
    """Eigenvalues, and eigenvectors as columns; ``None`` of a diagonal."""
    if isinstance(matrix, BlockDiagonal):
        found = [torch.linalg.eigh(section) for section in matrix.sections]
        values = torch.cat([own.flatten(1) for own, _ in found], 1)
        return values, BlockDiagonal([vectors for _, vectors in found])
    return (matrix, None) if matrix.ndim == 2 else _eigh(matrix)


def _eigh(values: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, and eigenvectors as columns."""
    found, rows = eigh(values)
    return found, rows.mT
