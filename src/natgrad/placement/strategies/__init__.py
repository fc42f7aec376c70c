"""Which rank does what, for which kind of cluster.

A strategy gives every block a `Duty`: who preconditions it and who decomposes its factors.
`assemble` makes the plan of that. To add one, write a frozen dataclass that is called with blocks
and world.
"""

from natgrad.placement.strategies.auto import Auto
from natgrad.placement.strategies.base import Duty, Placement, assemble
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
    "Placement",
    "ReduceScatter",
    "assemble",
]
