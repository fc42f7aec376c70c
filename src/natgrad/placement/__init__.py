"""Planning: which rank does what, from sizes alone. No torch."""

from natgrad.placement.cost import CostModel, Flops
from natgrad.placement.ops import (
    ApplyOp,
    Decompose,
    FactorId,
    Gather,
    Message,
    Op,
    Precondition,
    Reduce,
    ReduceGradient,
    RefreshOp,
    Return,
    Share,
    TotalGradients,
)
from natgrad.placement.plan import Agreement, Flows, Kept, Plan, Sent, Work
from natgrad.placement.simulator import Timeline, simulate
from natgrad.placement.strategies import (
    Auto,
    CommOpt,
    Duty,
    Hybrid,
    Local,
    MemOpt,
    ReduceScatter,
    Strategy,
    assemble,
)
from natgrad.placement.world import Cluster, World

__all__ = [
    "Agreement",
    "ApplyOp",
    "Auto",
    "Cluster",
    "CommOpt",
    "CostModel",
    "Decompose",
    "Duty",
    "FactorId",
    "Flops",
    "Flows",
    "Gather",
    "Hybrid",
    "Kept",
    "Local",
    "MemOpt",
    "Message",
    "Op",
    "Plan",
    "Precondition",
    "Reduce",
    "ReduceGradient",
    "ReduceScatter",
    "RefreshOp",
    "Return",
    "Sent",
    "Share",
    "Strategy",
    "Timeline",
    "TotalGradients",
    "Work",
    "World",
    "assemble",
    "simulate",
]
