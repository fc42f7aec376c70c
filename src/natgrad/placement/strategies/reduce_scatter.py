"""The stages of Osawa 2019 (sec. 3.3, algorithm 1): a reduce-scatter of factors and gradients to
the owners of layers, and an all-gather of preconditioned gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from natgrad.placement.cluster import Cluster
from natgrad.placement.cost import CostModel, Flops
from natgrad.placement.plan import Plan
from natgrad.placement.strategies.base import assemble
from natgrad.placement.strategies.hybrid import grid
from natgrad.placement.world import World
from natgrad.specs import BlockSpec


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """`MemOpt` that also sums local gradients, by a reduce-scatter to the owners.

    Where there are more ranks than blocks, Osawa 2019 lets several ranks compute a block
    redundantly (sec. 3.3). Here each block has one owner: what that would gain, more ranks to send
    the result from, even slices gain without the work.

    Arguments:
        cost: what decompositions and preconditioning cost, for balancing the load of the ranks.
        cluster: whose links decide by which routes everything travels.
    """

    cost: CostModel = field(default=Flops(), kw_only=True)
    cluster: Cluster = field(default=Cluster(), kw_only=True, repr=False)

    def __call__(self, blocks: Sequence[BlockSpec], world: World) -> Plan:
        duties = grid(blocks, world, 1, self.cost)
        return assemble(
            "ReduceScatter()", blocks, world, duties, scatters=True, cluster=self.cluster
        )
