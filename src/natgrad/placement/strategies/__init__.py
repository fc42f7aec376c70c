"""Which rank does what, for which kind of cluster."""

from natgrad.placement.strategies.auto import Auto
from natgrad.placement.strategies.base import Duty, Strategy, assemble
from natgrad.placement.strategies.hybrid import CommOpt, Hybrid, MemOpt
from natgrad.placement.strategies.local import Local
from natgrad.placement.strategies.reduce_scatter import ReduceScatter

__all__ = [
    "Auto",
    "CommOpt",
    "Duty",
    "Hybrid",
    "Local",
    "MemOpt",
    "ReduceScatter",
    "Strategy",
    "assemble",
]
