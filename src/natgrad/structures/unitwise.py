"""One dense block per output unit, a row of ``W`` (O32): 2x2 for a norm layer's pair."""

from dataclasses import dataclass

from natgrad.linalg.forms import Form, Triangle
from natgrad.structures.base import Shape
from natgrad.structures.persample import PerSample


@dataclass(frozen=True)
class UnitWise(PerSample):
    """Correlations between the weights into one unit are kept, those between units are not."""

    def form(self, shape: Shape) -> Form:
        groups, rows, cols = shape
        return Triangle(cols, batch=groups * rows)
