"""Structures of one factor, a second moment of whole per-sample gradients."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from torch import Tensor

from natgrad.inverses import Inverse, Parts
from natgrad.linalg.forms import Form
from natgrad.linalg.symmetric import DenseBlocks, DiagonalMatrix, Symmetric
from natgrad.structures.base import AnyLayer, Cache, Factor, Shape, Structure, Sums, add_vectors


class PerSample(Structure):
    """Cuts ``vec(W)`` into ``batch`` pieces of ``dim`` entries; inside a piece all is kept."""

    pooled: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("F",)

    @abstractmethod
    def form(self, shape: Shape) -> Form: ...

    def factors(self, layers: Sequence[AnyLayer]) -> dict[str, Factor]:
        return {"F": Factor(self.form(layers[0].shape), of_gradients=True)}

    def summaries(
        self, layer: AnyLayer, x: Any, g: Tensor, samples: int | None
    ) -> Iterator[tuple[Tensor, ...]]:
        for piece in layer.sample_gradients(x, g, samples):
            yield (piece,)

    def absorb(
        self, role: str, summary: tuple[Tensor, ...], sums: Sums, parts: dict[str, Parts]
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

    def precondition(
        self, parts: dict[str, Parts], inverse: Inverse, m: Tensor, damping: float, cache: Cache
    ) -> Tensor:
        return inverse.solve(parts["F"], self._pieces(parts, m), damping).view(m.shape)

    def multiply(
        self, parts: dict[str, Parts], inverse: Inverse, m: Tensor, damping: float
    ) -> Tensor:
        return inverse.multiply(parts["F"], self._pieces(parts, m), damping).view(m.shape)

    def _pieces(self, parts: dict[str, Parts], m: Tensor) -> Tensor:
        """``m [b, rows, cols]`` -> ``[batch, dim, 1]``."""
        return m.reshape(len(parts["F"][-1]), -1, 1)

    def matrix(
        self,
        kept: dict[str, Tensor],
        forms: dict[str, Form],
        shape: Shape,
        parts: dict[str, Parts] | None = None,
    ) -> Symmetric:
        form = forms["F"]
        return DiagonalMatrix(kept["F"]) if form.diagonal else DenseBlocks(form.dense(kept["F"]))
