"""Decompose a factor once, apply the result often; and what happens when that fails.

A factor is a symmetric matrix ``[d, d]``, or ``b`` of them. An inverse turns it into ``Parts``, a
tuple of tensors that travel between ranks, are stacked and saved, and that nobody but the inverse
itself looks into. There are two families:

`Inverse`          is told a damping with each factor and knows ``(factor + damping I)^-1`` alone.
                   The damping of a Kronecker product is split between its factors (Martens & Grosse
                   2015, sec. 6.3), an approximation of the damped block, and a new damping acts at
                   the next refresh. `ExplicitInverse` keeps that inverse as a matrix; derived from
                   it, an inverse is one method.
`Diagonalization`  (`natgrad.inverses.spectral`) gives all eigenvalues and eigenvectors, so that
                   damping, and any other function, acts on the whole block when it is applied: a
                   schedule of the damping acts at once.

Failure is contained (`contained`). A decomposition that fails is tried again in float64, then with
more and more on the diagonal; if nothing helps, the last good one stays and training goes on. The
diagonal is raised before the decomposition, for `Eigen` as well: a Cholesky inverse as a substitute
would have its damping in it already, and not fit a damping of the whole block.

An inverse of one's own derives from one of them: docs/own_inverse.md has two.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar

import torch
from torch import Tensor

from natgrad.errors import CoverageError
from natgrad.inverses.decomposed import Decomposed, FactorBlocks, FactorProduct
from natgrad.inverses.factor import DecomposedFactor
from natgrad.linalg.products import product
from natgrad.specs import FactorCost, FactorSpec, Routine

Parts = tuple[Tensor, ...]


class Inverse(ABC):
    """What must be written: ``decompose``, ``shapes`` and ``solve``. The rest follows from these,
    and may be overridden by something faster.

    ``damps_factors``: each factor is damped before it is decomposed, so that the damping of one may
    depend on the others of its block. ``pi_corrected``: it does so in a Kronecker product, where
    otherwise each factor gets the damping of the block."""

    damps_factors: ClassVar[bool] = True
    pi_corrected: bool = True

    @abstractmethod
    def decompose(self, matrix: Tensor, damping: Tensor) -> Parts:
        """Decompose ``matrix + damping I``; raises ``torch.linalg.LinAlgError`` where it cannot.

        Arguments:
            matrix: ``[b, d, d]``, symmetric; may be overwritten.
            damping: ``[b]``, ``≥ 0``, one for each matrix.
        """

    def decompose_rows(self, matrix: Tensor, damping: Tensor, rows: tuple[int, int]) -> Parts:
        """Some rows of the only part, of one matrix, where several ranks share them out: of those
        inverses whose ``cost`` says what they share.

        Arguments:
            matrix: ``[1, d, d]``, symmetric; may be overwritten.
            damping: ``[1]``, ``≥ 0``.
            rows: first one, and the one behind the last.
        """
        raise NotImplementedError(f"{type(self).__name__} is not made row by row")

    @abstractmethod
    def shapes(self, spec: FactorSpec) -> tuple[tuple[int, ...], ...]:
        """The shapes of the parts: ranks that receive them must know these beforehand.

        Arguments:
            spec: the sizes ``b`` and ``d`` of a factor that is not diagonal.
        """

    @abstractmethod
    def solve(self, parts: Parts, m: Tensor) -> Tensor:
        """``(matrix + damping I)^-1 m``.

        Arguments:
            parts: what ``decompose`` gave.
            m: ``[b, d, k]``.
        """

    def apply_power(self, parts: Parts, m: Tensor, exponent: float) -> Tensor:
        """``(matrix + damping I)^exponent m``, by an eigendecomposition of the dense inverse unless
        an inverse knows better: right for all of them, and slow.

        Arguments:
            parts: what ``decompose`` gave.
            m: ``[b, d, k]``.
            exponent: 1 multiplies with the damped matrix, -1/2 with the root of its inverse.
        """
        values, vectors = torch.linalg.eigh(self.dense(parts, m.shape[1]))
        powered: Tensor = vectors @ (values.pow(-exponent).unsqueeze(-1) * (vectors.mT @ m))
        return powered

    def explicit(self, parts: Parts) -> Tensor | None:
        """The damped inverse ``[b, d, d]`` where it is kept as a matrix: products with it are then
        batched.

        Arguments:
            parts: what ``decompose`` gave.
        """
        return None

    def dense(self, parts: Parts, dim: int) -> Tensor:
        """The damped inverse ``[b, d, d]``, made where it is not kept.

        Arguments:
            parts: what ``decompose`` gave.
            dim: ``d``.
        """
        like = parts[0]
        eye = torch.eye(dim, dtype=like.dtype, device=like.device)
        inverse = self.solve(parts, eye.expand(len(like), -1, -1).contiguous())
        return (inverse + inverse.mT) / 2

    def error(self, parts: Parts, matrix: Tensor, damping: Tensor) -> Tensor:
        """How far the parts are from decomposing another matrix, relative; a number. Here
        ``|(F + damping I)^-1_old (F + damping I) - I| / sqrt(b d)``.

        Arguments:
            parts: what ``decompose`` gave for an earlier matrix.
            matrix: ``[b, d, d]``, the matrix of now.
            damping: ``[b]``, the damping of now.
        """
        damped = matrix.clone()
        damped.diagonal(dim1=1, dim2=2).add_(damping.unsqueeze(1))
        return _residual(self.solve(parts, damped))

    def cost(self, spec: FactorSpec) -> FactorCost:
        """Operations that a factor takes, for the planner; here those of a Cholesky inverse.

        Arguments:
            spec: the sizes of the factor.
        """
        if spec.diagonal:
            return FactorCost(float(spec.batch * spec.dim), 1.0)
        by = Routine.CHOLESKY
        return FactorCost(spec.batch * by.operations(spec.dim), 2.0 * spec.dim, by)

    def workspace(self, spec: FactorSpec) -> int:
        """Numbers that are allocated at the busiest moment of decomposing a factor, the matrix and
        its parts among them, for the planner; here those of the routine that ``cost`` names.

        Arguments:
            spec: the sizes of the factor.
        """
        if spec.diagonal:
            return 4 * spec.batch * spec.dim
        return self.cost(spec).by.workspace(spec.dim, spec.batch)

    # Diagonal factors, such as those of embeddings, are damped and inverted entry by entry.

    def decompose_diagonal(self, values: Tensor, damping: Tensor) -> Parts:
        """``1 / (values + damping)``.

        Arguments:
            values: ``[b, d]``.
            damping: ``[b]``.
        """
        damped = values.clamp(min=0.0) + damping.unsqueeze(1)
        floor = values.amax(1, keepdim=True) * torch.finfo(values.dtype).eps
        return (damped.maximum(floor.clamp(min=1e-30)).reciprocal(),)

    def diagonal_shapes(self, spec: FactorSpec) -> tuple[tuple[int, ...], ...]:
        """The shapes of what ``decompose_diagonal`` gives.

        Arguments:
            spec: the sizes of a diagonal factor.
        """
        return ((spec.batch, spec.dim),)

    def diagonal_error(self, parts: Parts, values: Tensor, damping: Tensor) -> Tensor:
        """``error`` for diagonal factors.

        Arguments:
            parts: what ``decompose_diagonal`` gave for earlier values.
            values: ``[b, d]``, those of now.
            damping: ``[b]``, the damping of now.
        """
        return _residual(torch.diag_embed(parts[0] * (values + damping.unsqueeze(1))))

    # How decomposed factors become a block: structures ask for one of these.

    def blocks(self, factor: DecomposedFactor) -> Decomposed:
        """A block that is one factor, over pieces of ``vec(W)``.

        Arguments:
            factor: decomposed by this inverse.
        """
        return FactorBlocks(factor)

    def kronecker(self, g: DecomposedFactor | None, a: DecomposedFactor | None) -> Decomposed:
        """The block ``G x A``.

        Arguments:
            g: the factor over rows, decomposed by this inverse; ``None`` is the identity.
            a: the factor over columns, likewise.
        """
        return FactorProduct(g, a)

    def rotated(self, g: DecomposedFactor, a: DecomposedFactor, values: Tensor) -> Decomposed:
        """The block with eigenvalues of its own in the eigenbasis of ``G x A``; an inverse without
        eigenbasis raises `CoverageError`.

        Arguments:
            g: the factor over rows, decomposed by this inverse.
            a: the factor over columns, likewise.
            values: ``[b, rows * cols]``, the eigenvalues, none of them negative.
        """
        raise no_basis(self)


class ExplicitInverse(Inverse):
    """Kept as a matrix, ``parts = (inverse [b, d, d],)``: ``decompose`` is all that is missing."""

    def shapes(self, spec: FactorSpec) -> tuple[tuple[int, ...], ...]:
        return ((spec.batch, spec.dim, spec.dim),)

    def solve(self, parts: Parts, m: Tensor) -> Tensor:
        return product(parts[0], m, torch.empty_like(m))

    def explicit(self, parts: Parts) -> Tensor | None:
        return parts[0]

    def dense(self, parts: Parts, dim: int) -> Tensor:
        return parts[0]

    def apply_power(self, parts: Parts, m: Tensor, exponent: float) -> Tensor:
        if exponent == 1:
            multiplied: Tensor = torch.linalg.solve(parts[0], m)
            return multiplied
        return super().apply_power(parts, m, exponent)


def no_basis(inverse: Inverse) -> CoverageError:
    """The error of a structure that needs an eigenbasis.

    Arguments:
        inverse: that has no eigenvectors.
    """
    return CoverageError(
        f"EKFAC() works in an eigenbasis, which {inverse!r} does not give. Use "
        "inverse=natgrad.Eigen(), or structure=natgrad.Kronecker() with it."
    )


def contained(
    inverse: Inverse,
    make: Callable[[], Tensor],
    damping: Tensor,
    rows: tuple[int, int] | None = None,
) -> Parts | None:
    """The parts of ``make()``, or ``None`` if nothing helped: one bad factor must neither stop the
    training nor leave non-finite numbers behind. What fails is tried again in float64, and then
    with a growing share of the mean diagonal added.

    Decomposing overwrites the matrix. A second attempt is rare, so it is made anew then instead of
    being copied every time.

    Arguments:
        inverse: what decomposes it.
        make: gives the symmetric matrix ``[b, d, d]``, at every call as a new tensor.
        damping: ``[b]``, as `Inverse.decompose` takes it.
        rows: of the only part, as `Inverse.decompose_rows` takes them; ``None`` are all parts.
    """
    matrix = make()
    dtype = matrix.dtype
    if not _finite(matrix):
        return None
    for attempt, extra in _attempts(matrix, make, damping):
        try:
            if rows is None:
                parts = inverse.decompose(attempt, extra)
            else:
                parts = inverse.decompose_rows(attempt, extra, rows)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            continue
        if all(map(_finite, parts)):
            return tuple(part.to(dtype).contiguous() for part in parts)
    return None


def _attempts(
    matrix: Tensor, make: Callable[[], Tensor], damping: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """As it is; in float64; then with more and more on the diagonal."""
    yield matrix, damping
    double, extra = make().double(), damping.double()
    yield double.clone(), extra
    scale = double.diagonal(dim1=1, dim2=2).abs().mean(1).clamp(min=1e-30)
    for relative in (1e-8, 1e-5, 1e-2):
        more = relative * scale
        raised = double.clone()
        raised.diagonal(dim1=1, dim2=2).add_(more.unsqueeze(1))
        yield raised, extra


def _finite(numbers: Tensor) -> bool:
    """A sum is one pass over memory, where asking every number takes three."""
    return bool(torch.isfinite(numbers.sum()))


def _residual(left: Tensor) -> Tensor:
    """``|left - I| / sqrt(b d)`` of ``left [b, d, d]``, which is overwritten."""
    left.diagonal(dim1=1, dim2=2).sub_(1.0)
    error: Tensor = left.norm() / (left.shape[0] * left.shape[1]) ** 0.5
    return error
