"""Sizes of factors and blocks: everything a planner may know. No tensors, no torch."""

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class FactorSpec:
    """``batch`` symmetric matrices of size ``dim``, kept as ``numel`` numbers altogether."""

    dim: int
    batch: int
    numel: int
    diagonal: bool = False

    @property
    def decompose_flops(self) -> float:
        """A symmetric eigendecomposition takes about ``25 dim^3``."""
        return self.batch * (self.dim if self.diagonal else 25.0 * self.dim**3)


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """The curvature block of one weight: ``shape`` is ``(groups, rows, cols)``."""

    name: str
    shape: tuple[int, int, int]
    factors: dict[str, FactorSpec]

    @property
    def numel(self) -> int:
        return prod(self.shape)
