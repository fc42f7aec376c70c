"""The natural gradient: steepest under the norm that the curvature itself defines.

The length of ``d`` is ``sqrt(d^T F d)``, so that a step of one length changes the predictions by
one amount (Amari 1998). Its steepest direction is ``F^-1 grad``; powers between 0 and 1 lie between
the plain and the natural gradient (Yu et al. 2020 and others, see docs/references.md).
"""

from dataclasses import dataclass

from torch import Tensor

from natgrad.checks import Range, check_numbers
from natgrad.damping import Damping
from natgrad.geometry.base import Geometry, Kept
from natgrad.inverses import Decomposed, Function
from natgrad.inverses.functions import DampedPower


@dataclass(frozen=True)
class Euclidean(Geometry):
    """``(F + damping I)^-power`` times the gradient.

    Arguments:
        power: 1 is the natural gradient, 0 the plain one.
        factored: whether each Kronecker factor is damped by itself. Their powers are then kept as
            matrices and a step is two products instead of four; with ``Eigen()`` the damping of the
            whole block is exact without it, and a schedule of it acts at no cost.
    """

    power: float = 1.0
    factored: bool = False

    def __post_init__(self) -> None:
        check_numbers(self, power=Range(low=0, high=1))

    @property
    def uses_curvature(self) -> bool:
        return self.power > 0

    @property
    def is_linear(self) -> bool:
        return True

    def function(self, damping: Damping) -> Function | None:
        return None if self.factored else DampedPower(-self.power, damping)

    def step(self, block: Decomposed, m: Tensor, kept: Kept, damping: Damping, out: Tensor) -> None:
        if self.factored:
            block.whiten(m, 2 * self.power, damping, out)
        else:
            block.apply(DampedPower(-self.power, damping), m, out)
