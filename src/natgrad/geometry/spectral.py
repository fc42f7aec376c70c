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
factor, and two products. Where 16-bit products are faster (tensor cores; CPUs with instructions for
bfloat16) the polar factor and the way back are made of them, of layers that are large enough to
gain. The way there is not: what cancels in it is large, so that rounding would be two or three
hundredths of the whitened gradient, in directions of its smallest singular values, which the polar
factor then makes as long as the others (cosines of 0.55 to 0.98 with the exact step, instead of
0.98 to 0.999). On CPUs other layers take whitening and polar factor as one thing, which is one
product with the longer side instead of two (`natgrad.linalg.whitened_polar`).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.checks import Range, check_numbers, check_positive_fields
from natgrad.damping import Damping
from natgrad.errors import SettingError
from natgrad.geometry.base import Geometry, Kept, Shape
from natgrad.inverses import Decomposed
from natgrad.linalg.half_products import faster
from natgrad.linalg.polar import FLOOR, growth, half_polar, operations, polar
from natgrad.linalg.products import sandwiched
from natgrad.linalg.whitened_polar import whitened_polar

# Rows and columns from which on products of 16 bits gain more than rounding to them costs. By the
# layer's own shape, so that it does not matter which layers a rank has stacked.
_WORTH = 96


@dataclass(frozen=True)
class Spectral(Geometry):
    """The polar factor of the whitened gradient.

    Arguments:
        power: ``p``, how far the curvature is whitened: 0 measures none and is Muon, 1 is all of
            it. A half has won most comparisons.
        floor: singular values that are smaller than this share of their root mean square grow by
            its inverse, and so do not become 1: a batch says little of them. Tiny ones ask for all
            of the polar factor.
        half_products: multiply in bfloat16; ``None`` does where it is faster. Never in float64.
    """

    power: float = 0.5
    floor: float = FLOOR
    half_products: bool | None = None

    def __post_init__(self) -> None:
        check_numbers(self, power=Range(low=0, high=1))
        check_positive_fields(self, "floor", high=1)
        if self.half_products is not None and not isinstance(self.half_products, bool):
            raise SettingError(
                f"Spectral.half_products is {self.half_products!r} but must be True, False or "
                "None: None multiplies in bfloat16 where that is faster."
            )

    @property
    def uses_curvature(self) -> bool:
        return self.power > 0

    def operations(self, shape: Shape) -> float:
        # As GPUs do it. On CPUs it is less, by how much depends on LAPACK.
        groups, rows, cols = shape
        return groups * operations(rows, cols, self.floor)

    def step(self, block: Decomposed, m: Tensor, kept: Kept, damping: Damping, out: Tensor) -> None:
        if self._in_half(m):
            self._half_step(block, m, damping, out)
            return
        if self.power == 0:
            out.copy_(polar(m, self.floor))
            return
        rows, cols = m.shape[1:]
        tall = rows > cols
        sides = block.sides(self.power, damping, squared=1 if tall else 2) if m.is_cpu else None
        if sides is not None:
            left, right = sides
            most = growth(self.floor, m.shape)
            if tall:
                whitened_polar(right, m.mT, left, most, out.mT)
            else:
                whitened_polar(left, m, right, most, out)
            return
        white = polar(block.whiten(m, self.power, damping, out), self.floor)
        block.whiten(white, self.power, damping, out)

    def _in_half(self, m: Tensor) -> bool:
        if self.half_products is None:
            return min(m.shape[1:]) >= _WORTH and faster(m.dtype, m.device)
        return self.half_products and m.dtype == torch.float32

    def _half_step(self, block: Decomposed, m: Tensor, damping: Damping, out: Tensor) -> None:
        if self.power == 0:
            out.copy_(half_polar(m, self.floor))
            return
        sides = block.sides(self.power, damping)
        white = half_polar(block.whiten(m, self.power, damping, out), self.floor).contiguous()
        if sides is None:
            block.whiten(white.to(m.dtype), self.power, damping, out)
            return
        left, right = (None if side is None else side.to(torch.bfloat16) for side in sides)
        out.copy_(sandwiched(left, white, right))
