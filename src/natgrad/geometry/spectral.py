"""Steepest descent under the spectral norm, in coordinates whitened by the Fisher factors.

    M' = G^(-p/2) M A^(-p/2)          whiten
    step = G^(-p/2) polar(M') A^(-p/2)

A step whose largest singular value is bounded moves no direction of a layer's input by more than
that (Bernstein & Newhouse 2024), and the steepest of these has all singular values equal: the polar
factor. With ``p = 0`` that is Muon (Jordan et al. 2024). The factors say which inputs and which
outputs matter: in whitened coordinates a unit of length is a unit of change in the predictions.
Factors of Shampoo's instead of K-FAC's give Mousse (arXiv 2603.09697) and FISMO (arXiv 2601.21750),
the inputs' factor alone gives Newton-Muon (arXiv 2604.01472).

The roots are kept as matrices and change at a refresh, so that a step is two products, the polar
factor, and two products. On CPUs whitening and polar factor are one thing, which takes one product
with the longer side instead of two (`natgrad.linalg.whitened_polar`).
"""

from dataclasses import dataclass

from torch import Tensor

from natgrad.checks import Range, check_numbers, check_whole_fields
from natgrad.damping import Damping
from natgrad.geometry.base import Geometry, Kept, Shape
from natgrad.inverses import Decomposed
from natgrad.linalg.polar import growth, operations, polar
from natgrad.linalg.whitened_polar import whitened_polar


@dataclass(frozen=True)
class Spectral(Geometry):
    """The polar factor of the whitened gradient.

    Arguments:
        power: ``p``, how far the curvature is whitened: 0 measures none and is Muon, 1 is all of
            it. A half has won most comparisons.
        steps: polynomials of `natgrad.linalg.polar`. Where the polar factor is not made of these,
            on CPUs, they say by how much small singular values grow at most.
    """

    power: float = 0.5
    steps: int = 6

    def __post_init__(self) -> None:
        check_numbers(self, power=Range(low=0, high=1))
        check_whole_fields(self, "steps")

    @property
    def uses_curvature(self) -> bool:
        return self.power > 0

    def operations(self, shape: Shape) -> float:
        # As GPUs do it. On CPUs it is less, by how much depends on LAPACK.
        groups, rows, cols = shape
        return groups * operations(rows, cols, self.steps)

    def step(self, block: Decomposed, m: Tensor, kept: Kept, damping: Damping, out: Tensor) -> None:
        if self.power == 0:
            out.copy_(polar(m, self.steps))
            return
        rows, cols = m.shape[1:]
        tall = rows > cols
        sides = block.sides(self.power, damping, squared=1 if tall else 2) if m.is_cpu else None
        if sides is not None:
            left, right = sides
            most = growth(self.steps)
            if tall:
                whitened_polar(right, m.mT, left, most, out.mT)
            else:
                whitened_polar(left, m, right, most, out)
            return
        white = polar(block.whiten(m, self.power, damping, out), self.steps)
        block.whiten(white, self.power, damping, out)
