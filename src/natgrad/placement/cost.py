"""What decomposing a factor and preconditioning a block cost, from their sizes alone."""

from dataclasses import dataclass
from math import prod
from typing import Protocol

from natgrad.placement.checks import check_positive
from natgrad.specs import BlockSpec, FactorSpec


class CostModel(Protocol):
    """Operations, or whatever else adds up; `Cluster.flops` of them take a second.

    ``joint``: by eigendecomposition, otherwise by Cholesky."""

    def decompose(self, spec: FactorSpec, joint: bool) -> float: ...

    def precondition(self, block: BlockSpec, joint: bool) -> float: ...


@dataclass(frozen=True, slots=True)
class Flops:
    """``eigen d^3`` or ``cholesky d^3`` per matrix, and ``2 m n (m + n)`` for a two-sided product.

    Preconditioning with eigenvectors takes two of those products, there and back; a diagonal factor
    takes one operation per number."""

    eigen: float = 25.0
    cholesky: float = 2.0

    def __post_init__(self) -> None:
        check_positive(self, "eigen", "cholesky")

    def decompose(self, spec: FactorSpec, joint: bool) -> float:
        if spec.diagonal:
            return float(spec.batch * spec.dim)
        return (self.eigen if joint else self.cholesky) * spec.batch * float(spec.dim) ** 3

    def precondition(self, block: BlockSpec, joint: bool) -> float:
        numbers = float(prod(block.shape))
        specs = [block.factor(name) for name in block.decomposed]
        once = sum(numbers * (1 if spec.diagonal else 2 * spec.dim) for spec in specs)
        return 2 * once if joint else once
