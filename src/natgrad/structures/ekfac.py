"""K-FAC's eigenvectors with the true second moments along them (George et al. 2018).

``F = (Q_G x Q_A) diag(S) (Q_G x Q_A)^T`` with ``S = 1/N sum_n (Q_G^T dW_n Q_A)^2``: of all
diagonals in that basis the nearest to the block, where K-FAC has the product of the eigenvalues.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from natgrad.errors import SettingError
from natgrad.inverses import Basis, Decomposed, DecomposedFactor, Diagonalization, Inverse
from natgrad.inverses.base import no_basis
from natgrad.layers import SharedInput
from natgrad.linalg.block_diagonal import BlockDiagonal, Matrix
from natgrad.linalg.forms import DiagonalForm, Form
from natgrad.linalg.symmetric import Rotated, Symmetric
from natgrad.structures.base import AnyLayer, Factor, Factors, Shape, Structure, Sums
from natgrad.structures.kronecker import Kronecker, expand
from natgrad.structures.narrowing import check_blocks, narrow_blocks, short_repr
from natgrad.structures.traces import add_traces, more_positions


@dataclass(frozen=True)
class EKFAC(Structure):
    """The factors are those of ``Kronecker()``; the basis is that of the last refresh.

    ``S`` is the product of the eigenvalues until a batch has been seen in the first basis; later
    refreshes carry ``S`` over to the new basis.

    Where a factor has fewer samples than dimensions, its eigenvectors of eigenvalue 0 are any basis
    of that space. One is taken that depends on the space alone, so that another number of ranks or
    of threads changes ``S`` by rounding errors only.

    Arguments:
        sharing: which factors the basis is of: those of ``Kronecker()``, ``"expand"``, or
            ``"traces"``, the partial traces of the block.
        input_block: columns of the largest diagonal block that is kept of A; 1 keeps its diagonal,
            None all of it. ``S`` has all its numbers either way.
        gradient_block: the same for G.
    """

    input_block: int | None = None
    gradient_block: int | None = None
    sharing: Literal["expand", "traces"] | None = None

    pooled: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("A", "G", "S")
    in_basis: ClassVar[tuple[str, ...]] = ("S",)

    def factors(self, layers: Sequence[AnyLayer]) -> dict[str, Factor]:
        kept = self._product.factors(layers)
        groups, rows, cols = layers[0].shape
        kept["S"] = Factor(DiagonalForm(rows * cols, batch=groups), of_gradients=True)
        return kept

    @property
    def _product(self) -> Kronecker:
        return Kronecker(self.sharing or "expand", self.input_block, self.gradient_block)

    @property
    def whole(self) -> bool:  # type: ignore[override]
        return self.sharing == "traces"

    def __post_init__(self) -> None:
        if self.sharing not in (None, "expand", "traces"):
            raise SettingError(
                f"EKFAC.sharing is {self.sharing!r} but must be 'expand' or 'traces'; leave it out "
                "for 'expand'."
            )
        check_blocks(self)

    __repr__ = short_repr

    def narrowed(self, layers: Sequence[AnyLayer], max_dim: int) -> Structure:
        return replace(self, **narrow_blocks(self, layers[0], max_dim))

    def fits(self, layer: AnyLayer) -> bool:
        return isinstance(layer, SharedInput)

    def check(self, inverse: Inverse) -> None:
        if not isinstance(inverse, Diagonalization):
            raise no_basis(inverse)

    def add(self, layer: AnyLayer, x: Any, g: Tensor, sums: Sums) -> None:
        if not self.whole:
            expand(layer, x, g, sums)

    def summaries(
        self, layer: AnyLayer, x: Any, g: Tensor, samples: int | None
    ) -> Iterator[tuple[Tensor, ...]]:
        assert isinstance(layer, SharedInput)
        yield from layer.pairs(x, g, samples)

    def combine(self, one: tuple[Tensor, ...], two: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return more_positions(one, two)

    def absorb(
        self, role: str, summary: tuple[Tensor, ...], sums: Sums, decomposed: Factors
    ) -> None:
        if self.whole:
            add_traces(summary[0], summary[1], sums)
        if "S" not in sums or not {"A", "G"} <= set(decomposed):
            return
        bases = [_basis(decomposed[name]) for name in ("A", "G")]
        a, g = (
            basis.coordinates(t.to(basis.values.dtype))
            for basis, t in zip(bases, summary, strict=True)
        )
        if a.shape[2] == 1:  # one position: the square of a product is the product of squares
            total = torch.einsum("bnsr,bnsc->brc", g.square(), a.square())
        else:
            total = torch.einsum("bnsr,bnsc->bnrc", g, a).square_().sum(1)
        sums["S"].kept += total.flatten()
        sums["S"].count += 1

    def matrices(self, kept: dict[str, Tensor], forms: dict[str, Form]) -> dict[str, Tensor]:
        return self._product.matrices(super().matrices(kept, forms), forms)

    def follow(self, kept: dict[str, Tensor], old: Factors, new: Factors) -> dict[str, Tensor]:
        """``S`` is the product of the eigenvalues until a batch has been seen."""
        if not {"A", "G"} <= set(new):
            return {}
        if "S" in kept and {"A", "G"} <= set(old):
            return {"S": carry_over(kept["S"], old, new)}
        la, lg = (_basis(new[name]).values for name in ("A", "G"))
        return {"S": (lg.unsqueeze(2) * la.unsqueeze(1)).flatten(1)}

    def dampings(
        self, kept: dict[str, Tensor], forms: dict[str, Form], damping: float
    ) -> dict[str, Tensor]:
        return self._product.dampings(kept, forms, damping)

    def assemble(self, decomposed: Factors, in_basis: Mapping[str, Tensor]) -> Decomposed:
        g, a = decomposed["G"], decomposed["A"]
        return g.inverse.rotated(g, a, in_basis["S"])

    def matrix(
        self, kept: dict[str, Tensor], forms: dict[str, Form], shape: Shape, decomposed: Factors
    ) -> Symmetric:
        """With ``S`` taken as it is."""
        if decomposed:
            bases = [_basis(decomposed[name]) for name in ("G", "A")]
            g, a = (None if basis.is_identity else basis.rows.mT for basis in bases)
        else:
            merged = self.matrices(kept, forms)
            g, a = (_vectors(forms[name], merged[name]) for name in ("G", "A"))
        return Rotated(g, a, kept["S"].view(shape))


def carry_over(s: Tensor, old: Factors, new: Factors) -> Tensor:
    """``S [batch, rows * cols]`` in the new basis: ``R_G^2 S (R_A^T)^2``, ``R = Q_new^T Q_old``.

    Exact where coefficients in the old basis are uncorrelated, which is what EKFAC assumes anyway.

    Arguments:
        s: ``[batch, rows * cols]``, or flat.
        old: the factors whose eigenbasis it is in.
        new: those whose eigenbasis it is brought to.
    """
    a, g = _basis(new["A"]), _basis(new["G"])
    m = s.view(len(g.values), g.values.shape[1], a.values.shape[1])
    if not g.is_identity:
        m = _times(_overlap(g.rows, _basis(old["G"]).rows), m)
    if not a.is_identity:
        m = _times(m, _overlap(_basis(old["A"]).rows, a.rows))
    return m.reshape(len(g.values), -1)


def _basis(factor: DecomposedFactor) -> Basis:
    if not isinstance(factor.inverse, Diagonalization):
        raise no_basis(factor.inverse)
    return factor.inverse.basis_of(factor)


def _overlap(left: Matrix, right: Matrix) -> Matrix:
    """Squared cosines between two bases, of eigenvectors as rows."""
    if isinstance(left, BlockDiagonal):
        assert isinstance(right, BlockDiagonal)
        return left.times(right.mT).square()
    assert isinstance(right, Tensor)
    return (left @ right.mT).square()


def _times(left: Matrix, right: Matrix) -> Tensor:
    """A product of which one side at most is in blocks."""
    if isinstance(left, BlockDiagonal):
        assert isinstance(right, Tensor)
        return left.left_of(right)
    return right.right_of(left) if isinstance(right, BlockDiagonal) else left @ right


def _vectors(form: Form, kept: Tensor) -> Matrix | None:
    """Eigenvectors as columns ``[batch, dim, dim]``; a diagonal factor stays in its own order."""
    if form.diagonal:
        return None
    entries = form.entries(kept)
    if isinstance(entries, BlockDiagonal):
        return BlockDiagonal([torch.linalg.eigh(section)[1] for section in entries.sections])
    vectors: Tensor = torch.linalg.eigh(form.dense(kept))[1]
    return vectors
