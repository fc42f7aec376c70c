"""Planning: which rank does what, from sizes alone. No torch.

    strategies/    Placement: (blocks, world) -> Plan     a pure function, the same on every rank
    plan           Plan: tuples of ops for update, refresh and apply
    ops            Reduce, Decompose, Share, ...: what is done by which ranks, and what is sent
    routes, slices how it travels: message by message, or in even slices of fused buckets
    messages       what one rank sends to another
    flows          bytes of all ranks, without listing their messages
    cost           operations of a decomposition and of preconditioning, from sizes
    cluster        seconds of collectives
    measured_cost  seconds of computations, of a computer that was measured
    link_fit       the links of a `Cluster` from measured collectives
    cluster_files  both as a file
    simulator      seconds and bytes of a plan on a `Cluster`
    table, picture what a reader sees

A plan is frozen data, so that the same object can be executed, priced and printed: the bytes that
are predicted are the bytes that are sent. All ranks compute the same plan from the same sizes, and
compare its fingerprint.
"""

from natgrad.placement.amounts import Agreement, Kept, Sent, Work
from natgrad.placement.cluster import Cluster, Link
from natgrad.placement.cluster_files import (
    Circumstances,
    MeasuredCluster,
    read_cluster,
    write_cluster,
)
from natgrad.placement.cost import CostModel, Flops
from natgrad.placement.flows import Collective, Flows
from natgrad.placement.link_fit import CollectiveSeconds, fit_links
from natgrad.placement.measured_cost import MeasuredCost, SecondsBySize
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
from natgrad.placement.plan import Plan
from natgrad.placement.routes import Groups, Route, Routes
from natgrad.placement.simulator import Timeline, simulate
from natgrad.placement.strategies import (
    Auto,
    CommOpt,
    Duty,
    Hybrid,
    Local,
    MemOpt,
    Placement,
    ReduceScatter,
    assemble,
)
from natgrad.placement.world import World

__all__ = [
    "Agreement",
    "ApplyOp",
    "Auto",
    "Circumstances",
    "Cluster",
    "Collective",
    "CollectiveSeconds",
    "CommOpt",
    "CostModel",
    "Decompose",
    "Duty",
    "FactorId",
    "Flops",
    "Flows",
    "Gather",
    "Groups",
    "Hybrid",
    "Kept",
    "Link",
    "Local",
    "MeasuredCluster",
    "MeasuredCost",
    "MemOpt",
    "Message",
    "Op",
    "Placement",
    "Plan",
    "Precondition",
    "Reduce",
    "ReduceGradient",
    "ReduceScatter",
    "RefreshOp",
    "Return",
    "Route",
    "Routes",
    "SecondsBySize",
    "Sent",
    "Share",
    "Timeline",
    "TotalGradients",
    "Work",
    "World",
    "assemble",
    "fit_links",
    "read_cluster",
    "simulate",
    "write_cluster",
]
