"""Which entries of a layer's curvature block over ``vec(W)`` are kept, and how they are applied."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from natgrad.inverses import Inverse, Parts
from natgrad.layers import Layer
from natgrad.linalg.forms import Form, Triangle
from natgrad.linalg.symmetric import Symmetric

AnyLayer = Layer[Any]
Shape = tuple[int, int, int]
Cache = dict[str, Any]


class Factor(NamedTuple):
    """A kept part of the block. ``of_gradients``: a sum of products of two output gradients, so the
    scale of the loss enters it squared; otherwise it is a mean over positions of the inputs."""

    form: Form
    of_gradients: bool


@dataclass
class Sum:
    """A factor's sum over the data since the last step; ``count`` is the number of terms, which for
    a mean over positions is the divisor, and 0 as long as nothing was added."""

    form: Form
    kept: Tensor
    count: int = 0


Sums = dict[str, Sum]


class Structure(ABC):
    """``pooled``: the gradient of a sample is needed whole, so all calls of a module in one forward
    pass are brought together before anything is squared."""

    pooled: ClassVar[bool] = False
    needs: ClassVar[tuple[str, ...]]  # the parts without which nothing can be preconditioned
    in_basis: ClassVar[
        tuple[str, ...]
    ] = ()  # factors in the basis of the others, parts as they are

    @abstractmethod
    def factors(self, layers: Sequence[AnyLayer]) -> dict[str, Factor]:
        """Every factor of the block of a weight that ``layers`` use, before any data is seen."""

    def add(self, layer: AnyLayer, x: Any, g: Tensor, sums: Sums) -> None:
        """Add what is a sum over positions to those factors that are in ``sums``."""
        return

    def summaries(
        self, layer: AnyLayer, x: Any, g: Tensor, samples: int | None
    ) -> Iterator[tuple[Tensor, ...]]:
        """What is needed of whole samples, a piece of the samples at a time."""
        return iter(())

    def combine(self, one: tuple[Tensor, ...], two: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The summary of two calls on the same samples."""
        return tuple(a + b for a, b in zip(one, two, strict=True))

    def folded(self, layer: AnyLayer, gs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Fewer gradients of one call that add as much to the factors as ``gs``, the gradients of
        several vectors, do together."""
        return gs

    def role(self, layer: AnyLayer) -> str:
        """Calls are combined with those of the same role."""
        return ""

    def absorb(
        self, role: str, summary: tuple[Tensor, ...], sums: Sums, parts: dict[str, Parts]
    ) -> None:
        """Add a summary to those factors that are in ``sums``."""
        return

    def decomposed(self, kept: dict[str, Tensor], forms: dict[str, Form]) -> dict[str, Tensor]:
        """The factors that are decomposed, in their forms."""
        return kept

    def follow(
        self, kept: dict[str, Tensor], old: dict[str, Parts], new: dict[str, Parts]
    ) -> dict[str, Tensor]:
        """The factors of ``in_basis`` after the basis went from ``old`` to ``new``."""
        return {}

    @abstractmethod
    def dampings(
        self, kept: dict[str, Tensor], forms: dict[str, Form], damping: float
    ) -> dict[str, Tensor]:
        """What an inverse that damps each factor by itself adds: ``[batch]`` per factor."""

    @abstractmethod
    def precondition(
        self, parts: dict[str, Parts], inverse: Inverse, m: Tensor, damping: float, cache: Cache
    ) -> Tensor:
        """``(block + damping I)^-1 m`` for ``m [b, rows, cols]``; ``cache`` lasts to a refresh."""

    @abstractmethod
    def multiply(
        self, parts: dict[str, Parts], inverse: Inverse, m: Tensor, damping: float
    ) -> Tensor:
        """``block m``."""

    @abstractmethod
    def matrix(
        self,
        kept: dict[str, Tensor],
        forms: dict[str, Form],
        shape: Shape,
        parts: dict[str, Parts] | None = None,
    ) -> Symmetric:
        """The block over ``vec(W)`` in the order ``(group, row, column)``, as the kept factors give
        it; ``parts``: of the basis that factors of ``in_basis`` are in."""

    def dense(self, kept: dict[str, Tensor], forms: dict[str, Form], shape: Shape) -> Tensor:
        """The same, ``[P, P]``."""
        return self.matrix(kept, forms, shape).dense()


def plain(layer: AnyLayer) -> str:
    """A layer in an error message."""
    return f"{layer.kind} {layer.name!r}"


def add_vectors(total: Sum, rows: Tensor) -> None:
    """Add ``sum_n r r^T`` of ``rows [groups, n, d]``, or its diagonal where that is kept."""
    rows = rows.to(total.kept.dtype)
    if isinstance(total.form, Triangle):
        total.form.add_rows(total.kept, rows)
    else:
        total.kept += rows.square().sum(1).flatten()
    total.count += rows.shape[1]
