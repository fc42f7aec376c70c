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
    presets        clusters by name
    workload       what a step costs besides K-FAC
    training_step  a whole step on two lanes, and the average one
    rank_memory    all that a rank keeps, and the largest batch that fits
    table, picture what a reader sees

A plan is frozen data, so that the same object can be executed, priced and printed: the bytes that
are predicted are the bytes that are sent. All ranks compute the same plan from the same sizes, and
compare its fingerprint.
"""

from natgrad.placement.amounts import Agreement, Memory, Sent, Work
from natgrad.placement.cluster import Cluster, Link
from natgrad.placement.cluster_files import (
    Circumstances,
    MeasuredCluster,
    read_cluster,
    write_cluster,
)
from natgrad.placement.collectives import Collective, Flows
from natgrad.placement.cost import CostModel, Flops
from natgrad.placement.link_fit import CollectiveSeconds, fit_links
from natgrad.placement.measured_cost import MeasuredCost, Passing, SecondsBySize
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
from natgrad.placement.presets import CLUSTERS
from natgrad.placement.rank_memory import RankMemory, largest_batch, rank_memory
from natgrad.placement.routes import Groups, Route, Routes
from natgrad.placement.simulator import Stages, Timeline, simulate
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
from natgrad.placement.training_step import Kind, Span, StepModel, TrainingStep
from natgrad.placement.workload import Arrival, Workload
from natgrad.placement.world import World

__all__ = [
    "CLUSTERS",
    "Agreement",
    "ApplyOp",
    "Arrival",
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
    "Kind",
    "Link",
    "Local",
    "MeasuredCluster",
    "MeasuredCost",
    "MemOpt",
    "Memory",
    "Message",
    "Op",
    "Passing",
    "Placement",
    "Plan",
    "Precondition",
    "RankMemory",
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
    "Span",
    "Stages",
    "StepModel",
    "Timeline",
    "TotalGradients",
    "TrainingStep",
    "Work",
    "Workload",
    "World",
    "assemble",
    "fit_links",
    "largest_batch",
    "rank_memory",
    "read_cluster",
    "simulate",
    "write_cluster",
]
