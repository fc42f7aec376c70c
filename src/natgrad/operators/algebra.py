"""Operators made of others: sums, multiples, diagonal blocks, and dense ones."""

import torch
from torch import Tensor

from natgrad.errors import SettingError
from natgrad.operators.base import Operator


class OperatorSum(Operator):
    """``Σ_i weight_i A_i``.

    Arguments:
        terms: pairs ``(weight, operator)``, at least one; operators over other parameters than the
            first raise `SettingError`.
    """

    def __init__(self, terms: list[tuple[float, Operator]]) -> None:
        first = terms[0][1]
        for _, other in terms[1:]:
            if other.size != first.size:
                raise SettingError(
                    f"{first.kind} has {first.size:,} parameters and {other.kind} "
                    f"{other.size:,}, so they cannot be added: take matrices of the same ones."
                )
            if _names(other) != _names(first):
                raise SettingError(
                    f"{first.kind} and {other.kind} are over different parameters, so they cannot "
                    "be added: take matrices of the same ones."
                )
        signs = ["" if w == 1 else "-" if w == -1 else f"{w:g} " for w, _ in terms]
        kind = " + ".join(f"{sign}{one.kind}" for sign, (_, one) in zip(signs, terms, strict=True))
        super().__init__(first.problem, kind, size=first.size)
        self.terms = terms
        self.space = first.space
        self.definite = all(w >= 0 and one.definite for w, one in terms)

    def product(self, v: Tensor) -> Tensor:
        return sum((w * one.product(v) for w, one in self.terms), torch.zeros_like(v))

    def _dense(self) -> Tensor:
        out = self._new(self.size, self.size)
        for w, one in self.terms:
            out += w * one.dense()
        return out

    def diagonal(self) -> Tensor:
        return sum((w * one.diagonal() for w, one in self.terms), self._new(self.size))


def _names(operator: Operator) -> dict[str, tuple[int, ...]] | None:
    return None if operator.space is None else operator.space.shapes


class DiagonalBlock(Operator):
    """The rows and columns of another operator that belong to one layer: its diagonal block.

    Arguments:
        whole: the operator that the block is part of.
        index: ``[size]``, where the layer's entries lie in a flat vector of ``whole``.
        name: of the layer, for ``kind``.
    """

    def __init__(self, whole: Operator, index: Tensor, name: str) -> None:
        super().__init__(whole.problem, f"{whole.kind}, {name}", size=len(index))
        self.whole, self.index = whole, index
        self.definite = whole.definite

    def product(self, v: Tensor) -> Tensor:
        padded = v.new_zeros(self.whole.size, v.shape[1])
        padded[self.index] = v
        return self.whole.product(padded)[self.index]
