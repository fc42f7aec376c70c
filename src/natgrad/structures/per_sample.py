"""Structures of one factor, a second moment of whole per-sample gradients.

``vec(W)`` is cut into equal pieces, and all entries within a piece are kept: one piece is `Full`, a
piece for each row `UnitWise`, a piece for each entry `Diagonal`. A structure of this kind only says
what the pieces are.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from natgrad.inverses import Decomposed
from natgrad.linalg.forms import Form
from natgrad.linalg.symmetric import DenseBlocks, DiagonalMatrix, Symmetric
from natgrad.structures.base import AnyLayer, Factor, Factors, Shape, Structure, Sums, add_vectors


class PerSample(Structure):
    """Cuts ``vec(W)`` into ``batch`` pieces of ``dim`` entries; inside a piece all is kept."""

    pooled: ClassVar[bool] = True
    whole: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("F",)

    @abstractmethod
    def form(self, shape: Shape) -> Form:
        """How the factor ``F`` is kept: as ``batch`` matrices of size ``dim``, or their diagonal.

        Arguments:
            shape: ``(groups, rows, cols)`` of the weight; ``batch * dim`` is their product.
        """

    def factors(self, layers: Sequence[AnyLayer]) -> dict[str, Factor]:
        return {"F": Factor(self.form(layers[0].shape), of_gradients=True)}

    def summaries(
        self, layer: AnyLayer, x: Any, g: Tensor, samples: int | None
    ) -> Iterator[tuple[Tensor, ...]]:
        for piece in layer.sample_gradients(x, g, samples):
            yield (piece,)

    def absorb(
        self, role: str, summary: tuple[Tensor, ...], sums: Sums, decomposed: Factors
    ) -> None:
        if "F" not in sums:
            return
        (grads,) = summary  # [n, groups, rows, cols]
        total, n = sums["F"], len(grads)
        rows = grads.reshape(n, total.form.batch, total.form.dim)
        add_vectors(total, rows.transpose(0, 1))

    def dampings(
        self, kept: dict[str, Tensor], forms: dict[str, Form], damping: float
    ) -> dict[str, Tensor]:
        return {"F": kept["F"].new_full((forms["F"].batch,), damping)}

    def assemble(self, decomposed: Factors, in_basis: Mapping[str, Tensor]) -> Decomposed:
        return decomposed["F"].inverse.blocks(decomposed["F"])

    def matrix(
        self, kept: dict[str, Tensor], forms: dict[str, Form], shape: Shape, decomposed: Factors
    ) -> Symmetric:
        form = forms["F"]
        return DiagonalMatrix(kept["F"]) if form.diagonal else DenseBlocks(form.dense(kept["F"]))
