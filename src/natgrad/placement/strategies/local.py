"""No factor is ever sent: the owner of a block makes its factors from its own data."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from natgrad.placement.cost import CostModel, Flops
from natgrad.placement.plan import Plan
from natgrad.placement.strategies.base import assemble
from natgrad.placement.strategies.hybrid import grid
from natgrad.placement.world import World
from natgrad.specs import BlockSpec


@dataclass(frozen=True, slots=True)
class Local:
    """Owners as those of `MemOpt`. The factors are noisier, from 1/W of the data each."""

    cost: CostModel = field(default=Flops(), kw_only=True)

    def __call__(self, blocks: Sequence[BlockSpec], world: World) -> Plan:
        duties = grid(blocks, world, 1, self.cost)
        return assemble("Local()", blocks, world, duties, reduces=False)
