"""One dense block per output unit, a row of ``W``: 2x2 for a norm layer (Osawa 2020).

A norm layer has a weight and a bias for each unit and no input that units share, so it has no
Kronecker factors. A block keeps how the two numbers of a unit vary together.
"""

from dataclasses import dataclass

from natgrad.linalg.forms import Form, Triangle
from natgrad.structures.base import Shape
from natgrad.structures.per_sample import PerSample


@dataclass(frozen=True)
class UnitWise(PerSample):
    """Correlations between the weights into one unit are kept, those between units are not."""

    def form(self, shape: Shape) -> Form:
        groups, rows, cols = shape
        return Triangle(cols, batch=groups * rows)
