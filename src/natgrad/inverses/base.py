"""Decompose a factor once, apply the result often; and what happens when that fails."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar

import torch
from torch import Tensor

from natgrad.specs import FactorSpec

Parts = tuple[Tensor, ...]


class Inverse(ABC):
    """``joint``: damping acts when applying, on eigenvalues of the whole block; otherwise it was
    added to each factor before the decomposition."""

    joint: ClassVar[bool]

    @abstractmethod
    def decompose(self, matrix: Tensor, damping: Tensor) -> Parts:
        """``matrix [b, d, d]`` (symmetric), ``damping [b]`` -> parts with a leading ``b``.

        ``matrix`` may be overwritten. Raises ``torch.linalg.LinAlgError``.
        """

    @abstractmethod
    def decompose_diagonal(self, values: Tensor, damping: Tensor) -> Parts:
        """The same for diagonal matrices, ``values [b, d]``."""

    @abstractmethod
    def shapes(self, spec: FactorSpec) -> tuple[tuple[int, ...], ...]:
        """Of the parts that a factor of these sizes gets."""

    @abstractmethod
    def solve(self, parts: Parts, m: Tensor, damping: float) -> Tensor:
        """``(matrix + damping I)^-1 m`` for ``m [b, d, k]``."""

    @abstractmethod
    def multiply(self, parts: Parts, m: Tensor, damping: float) -> Tensor:
        """``matrix m`` for ``m [b, d, k]``, as far as the parts still know the matrix."""

    @abstractmethod
    def error(self, parts: Parts, matrix: Tensor, damping: Tensor) -> Tensor:
        """How far the parts are from decomposing ``matrix [b, d, d]``, relative; a number."""


def contained(inverse: Inverse, make: Callable[[], Tensor], damping: Tensor) -> Parts | None:
    """The parts of ``make() [b, d, d]``, or ``None`` if nothing helped: one bad factor must neither
    stop the training nor leave non-finite numbers behind.

    Decomposing overwrites the matrix. A second attempt is rare, so it is made anew then instead of
    being copied every time.
    """
    matrix = make()
    dtype = matrix.dtype
    if not _finite(matrix):
        return None
    for attempt, extra in _attempts(matrix, make, damping):
        try:
            parts = inverse.decompose(attempt, extra)
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
