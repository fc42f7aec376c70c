"""The stages of Osawa 2019 (sec. 3.3, algorithm 1): a reduce-scatter of factors and gradients to
the owners of layers, and an all-gather of preconditioned gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from natgrad.placement.cost import CostModel, Flops
from natgrad.placement.plan import Plan
from natgrad.placement.strategies.base import Duty, assemble, join_idle
from natgrad.placement.strategies.hybrid import grid
from natgrad.placement.world import World
from natgrad.specs import BlockSpec


@dataclass(frozen=True, slots=True)
class ReduceScatter:
    """`MemOpt` that also sums local gradients, by a reduce-scatter to the owners.

    Where there are more ranks than blocks, several ranks own a block together and compute it
    redundantly (Osawa 2019, sec. 3.3).

    Arguments:
        cost: what decompositions and preconditioning cost, for balancing the load of the ranks.
    """

    cost: CostModel = field(default=Flops(), kw_only=True)

    def __call__(self, blocks: Sequence[BlockSpec], world: World) -> Plan:
        owners = [list(duty.workers) for duty in grid(blocks, world, 1, self.cost)]
        busy = {rank for ranks in owners for rank in ranks}
        join_idle([r for r in world.ranks if r not in busy], owners, [b.numel for b in blocks])
        duties = []
        for block, ranks in zip(blocks, owners, strict=True):
            everyone = tuple(sorted(ranks))
            duties.append(Duty(everyone, dict.fromkeys(block.decomposed, everyone)))
        return assemble("ReduceScatter()", blocks, world, duties, scatters=True)
