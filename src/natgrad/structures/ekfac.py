"""K-FAC's eigenvectors with the true second moments along them (George et al. 2018).

``F = (Q_G x Q_A) diag(S) (Q_G x Q_A)^T`` with ``S = 1/N sum_n (Q_G^T dW_n Q_A)^2``: of all
diagonals in that basis the nearest to the block, where K-FAC has the product of the eigenvalues.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from natgrad.inverses import Inverse, Parts, floored
from natgrad.layers import SharedInput
from natgrad.linalg.forms import DiagonalForm, Form
from natgrad.linalg.symmetric import Rotated, Symmetric
from natgrad.structures.base import AnyLayer, Cache, Factor, Shape, Structure, Sums
from natgrad.structures.kronecker import Kronecker, expand, filtered, merge_transposed


@dataclass(frozen=True)
class EKFAC(Structure):
    """The factors are those of ``Kronecker()``; the basis is that of the last refresh.

    Until a batch has been seen in a new basis the eigenvalues' product stands in for ``S``; later
    refreshes carry ``S`` over to the new basis.
    """

    pooled: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("A", "G", "S")
    in_basis: ClassVar[tuple[str, ...]] = ("S",)

    def factors(self, layers: Sequence[AnyLayer]) -> dict[str, Factor]:
        kept = Kronecker().factors(layers)
        groups, rows, cols = layers[0].shape
        kept["S"] = Factor(DiagonalForm(rows * cols, batch=groups), of_gradients=True)
        return kept

    def add(self, layer: AnyLayer, x: Any, g: Tensor, sums: Sums) -> None:
        expand(layer, x, g, sums)

    def summaries(
        self, layer: AnyLayer, x: Any, g: Tensor, samples: int | None
    ) -> Iterator[tuple[Tensor, ...]]:
        assert isinstance(layer, SharedInput)
        yield from layer.pairs(x, g, samples)

    def combine(self, one: tuple[Tensor, ...], two: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(torch.cat([a, b], 2) for a, b in zip(one, two, strict=True))  # more positions

    def absorb(
        self, role: str, summary: tuple[Tensor, ...], sums: Sums, parts: dict[str, Parts]
    ) -> None:
        if "S" not in sums or "A" not in parts or "G" not in parts:
            return
        a, g = (
            _rotate(parts[name][0], t.to(parts[name][1].dtype))
            for name, t in zip("AG", summary, strict=True)
        )
        if a.shape[2] == 1:  # one position: the square of a product is the product of squares
            total = torch.einsum("bnsr,bnsc->brc", g.square(), a.square())
        else:
            total = torch.einsum("bnsr,bnsc->bnrc", g, a).square_().sum(1)
        sums["S"].kept += total.flatten()
        sums["S"].count += 1

    def decomposed(self, kept: dict[str, Tensor], forms: dict[str, Form]) -> dict[str, Tensor]:
        return merge_transposed({n: t for n, t in kept.items() if n != "S"}, forms)

    def follow(
        self, kept: dict[str, Tensor], old: dict[str, Parts], new: dict[str, Parts]
    ) -> dict[str, Tensor]:
        if "S" in kept and "S" in old:
            return {"S": carry_over(kept["S"], old, new)}
        return {"S": product_of_eigenvalues(new)}

    def dampings(
        self, kept: dict[str, Tensor], forms: dict[str, Form], damping: float
    ) -> dict[str, Tensor]:
        return Kronecker().dampings(kept, forms, damping)

    def precondition(
        self, parts: dict[str, Parts], inverse: Inverse, m: Tensor, damping: float, cache: Cache
    ) -> Tensor:
        ra, rg, s = parts["A"][0], parts["G"][0], parts["S"][0].view(m.shape)
        if cache.get("damping") != damping:
            scale = floored(s + damping, s.flatten(1).amax(1)).reciprocal_()
            cache.update(damping=damping, scale=scale)
        return filtered(rg, ra, m, cache["scale"])

    def multiply(
        self, parts: dict[str, Parts], inverse: Inverse, m: Tensor, damping: float
    ) -> Tensor:
        return filtered(parts["G"][0], parts["A"][0], m, parts["S"][0].view(m.shape))

    def matrix(
        self,
        kept: dict[str, Tensor],
        forms: dict[str, Form],
        shape: Shape,
        parts: dict[str, Parts] | None = None,
    ) -> Symmetric:
        """Without ``parts`` in the eigenbasis of the kept factors, with ``S`` taken as it is."""
        if parts is None:
            merged = self.decomposed(kept, forms)
            g, a = (_vectors(forms[name], merged[name]) for name in ("G", "A"))
        else:
            g, a = (rows.mT if (rows := parts[n][0]).numel() else None for n in ("G", "A"))
        return Rotated(g, a, kept["S"].view(shape))


def product_of_eigenvalues(parts: dict[str, Parts]) -> Tensor:
    """What stands in for ``S [batch, rows * cols]``."""
    (_, la), (_, lg) = parts["A"], parts["G"]
    return (lg.unsqueeze(2) * la.unsqueeze(1)).flatten(1)


def carry_over(s: Tensor, old: dict[str, Parts], new: dict[str, Parts]) -> Tensor:
    """``S [batch, rows * cols]`` in the new basis: ``R_G^2 S (R_A^T)^2``, ``R = Q_new^T Q_old``.

    Exact where coefficients in the old basis are uncorrelated, which is what EKFAC assumes anyway.
    """
    (ra, la), (rg, lg) = new["A"], new["G"]
    m = s.view(len(lg), lg.shape[1], la.shape[1])
    if rg.numel():
        m = (rg @ old["G"][0].mT).square() @ m
    if ra.numel():
        m = m @ (old["A"][0] @ ra.mT).square()
    return m.reshape(len(lg), -1)


def _vectors(form: Form, kept: Tensor) -> Tensor | None:
    """Eigenvectors as columns ``[batch, dim, dim]``; a diagonal factor stays in its own order."""
    if form.diagonal:
        return None
    vectors: Tensor = torch.linalg.eigh(form.dense(kept))[1]
    return vectors


def _rotate(rows: Tensor, t: Tensor) -> Tensor:
    """``t [b, n, s, d] @ rows^T``, or ``t`` itself in the basis of a diagonal factor."""
    return t if rows.numel() == 0 else t @ rows.mT.unsqueeze(1)
