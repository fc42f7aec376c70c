"""No factor is ever sent: the owner of a block makes its factors from its own data.

It trades accuracy for bytes, and is the only strategy that changes the result.
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
class Local:
    """Owners as those of `MemOpt`. The factors are noisier, as each comes from 1/W of the data.

    Arguments:
        cost: what decompositions and preconditioning cost, for balancing the load of the ranks.
        cluster: whose links decide by which routes everything travels.
    """

    cost: CostModel = field(default=Flops(), kw_only=True)
    cluster: Cluster = field(default=Cluster(), kw_only=True, repr=False)

    def __call__(self, blocks: Sequence[BlockSpec], world: World) -> Plan:
        duties = grid(blocks, world, 1, self.cost)
        return assemble("Local()", blocks, world, duties, reduces=False, cluster=self.cluster)
