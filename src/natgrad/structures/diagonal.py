"""Only the diagonal (O33): ``F = 1/N sum_n dW_n^2``."""

from dataclasses import dataclass
from math import prod

from natgrad.linalg.forms import DiagonalForm, Form
from natgrad.structures.base import Shape
from natgrad.structures.persample import PerSample


@dataclass(frozen=True)
class Diagonal(PerSample):
    """As many numbers as the layer has parameters."""

    def form(self, shape: Shape) -> Form:
        return DiagonalForm(prod(shape))
