"""Which entries of a layer's block are kept."""

from natgrad.structures.base import Factor, Factors, Shape, Structure, Sum, Sums
from natgrad.structures.diagonal import Diagonal
from natgrad.structures.ekfac import EKFAC
from natgrad.structures.full import Full
from natgrad.structures.identity import Identity
from natgrad.structures.kronecker import Kronecker
from natgrad.structures.narrowing import MAX_DIM
from natgrad.structures.per_sample import PerSample
from natgrad.structures.unitwise import UnitWise

__all__ = [
    "EKFAC",
    "MAX_DIM",
    "Diagonal",
    "Factor",
    "Factors",
    "Full",
    "Identity",
    "Kronecker",
    "PerSample",
    "Shape",
    "Structure",
    "Sum",
    "Sums",
    "UnitWise",
]
