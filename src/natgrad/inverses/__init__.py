"""How a kept factor is inverted."""

from natgrad.inverses.base import Inverse, Parts, contained
from natgrad.inverses.cholesky import Cholesky
from natgrad.inverses.eigen import Eigen, floored

__all__ = ["Cholesky", "Eigen", "Inverse", "Parts", "contained", "floored"]
