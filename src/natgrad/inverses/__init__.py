"""How a kept factor is decomposed, so that functions of its block can be applied."""

from natgrad.inverses.base import ExplicitInverse, Inverse, Parts, contained
from natgrad.inverses.basis import Basis
from natgrad.inverses.cholesky import Cholesky
from natgrad.inverses.decomposed import Decomposed
from natgrad.inverses.eigen import Eigen
from natgrad.inverses.factor import DecomposedFactor
from natgrad.inverses.functions import DampedPower, Function
from natgrad.inverses.low_rank import LowRank
from natgrad.inverses.spectral import Diagonalization
from natgrad.specs import FactorCost, FactorSpec

__all__ = [
    "Basis",
    "Cholesky",
    "DampedPower",
    "Decomposed",
    "DecomposedFactor",
    "Diagonalization",
    "Eigen",
    "ExplicitInverse",
    "FactorCost",
    "FactorSpec",
    "Function",
    "Inverse",
    "LowRank",
    "Parts",
    "contained",
]
