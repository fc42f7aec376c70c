"""What decomposing a factor and preconditioning a block cost, from their sizes alone.

For a block ``[m, n]`` with factors ``[n, n]`` and ``[m, m]``, a refresh costs ``O(n³ + m³)``
operations, and preconditioning ``2 m n (m + n)`` at every step. Strategies balance the load of the
ranks with these numbers.
"""

from dataclasses import dataclass
from math import prod
from typing import Protocol, runtime_checkable

from natgrad.specs import BlockSpec, FactorSpec


class CostModel(Protocol):
    """Operations, or whatever else adds up; `Cluster.flops` of them take a second."""

    def decompose(self, spec: FactorSpec) -> float:
        """Cost of decomposing one factor.

        Arguments:
            spec: sizes of the factor.
        """

    def precondition(self, block: BlockSpec) -> float:
        """Cost of preconditioning one block.

        Arguments:
            block: its shape, and the sizes of its factors.
        """


@runtime_checkable
class Folding(Protocol):
    """A cost model that also knows what an update takes beside its messages."""

    def fold(self, spec: FactorSpec) -> float:
        """Cost of folding one factor's sum into its running average.

        Arguments:
            spec: sizes of the factor.
        """


@dataclass(frozen=True, slots=True)
class Flops:
    """As the inverse of each factor says (``Inverse.cost``): to decompose it, and to apply it to
    every number of the gradient."""

    def decompose(self, spec: FactorSpec) -> float:
        """Operations of decomposing one factor.

        Arguments:
            spec: sizes of the factor, and the cost that its inverse gave.
        """
        return spec.work.decompose

    def precondition(self, block: BlockSpec) -> float:
        """Operations of all decomposed factors of a block together, and of the geometry.

        Arguments:
            block: its shape, and the costs of its decomposed factors.
        """
        each = sum(block.factor(name).work.apply for name in block.decomposed)
        return float(prod(block.shape)) * each + block.operations
