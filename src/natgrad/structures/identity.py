"""No curvature at all: for geometries that take none, such as Muon's."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from natgrad.inverses import Decomposed
from natgrad.inverses.identity import IdentityBlock
from natgrad.linalg.forms import Form
from natgrad.linalg.symmetric import DiagonalMatrix, Symmetric
from natgrad.structures.base import AnyLayer, Factor, Factors, Shape, Structure


@dataclass(frozen=True)
class Identity(Structure):
    """``F = I``: nothing is measured, kept, decomposed or sent, and every layer fits."""

    needs: ClassVar[tuple[str, ...]] = ()

    def factors(self, layers: Sequence[AnyLayer]) -> dict[str, Factor]:
        return {}

    def dampings(
        self, kept: dict[str, Tensor], forms: dict[str, Form], damping: float
    ) -> dict[str, Tensor]:
        return {}

    def assemble(self, decomposed: Factors, in_basis: Mapping[str, Tensor]) -> Decomposed:
        return IdentityBlock()

    def matrix(
        self, kept: dict[str, Tensor], forms: dict[str, Form], shape: Shape, decomposed: Factors
    ) -> Symmetric:
        return DiagonalMatrix(torch.ones(prod(shape)))
