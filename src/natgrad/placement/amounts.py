"""What a plan costs one rank, in bytes and operations: sent, kept, computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from natgrad.placement.travel import Travel


@dataclass(frozen=True, slots=True)
class Agreement:
    """What one rank sends to agree with the others: all-reduces of counts and of votes, by which no
    rank does what others do not.

    Arguments:
        update: bytes at an update.
        refresh: bytes at a refresh of all factors.
        apply: bytes at every step.
    """

    update: float
    refresh: float
    apply: float


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes that one rank sends to others. An all-reduce of n bytes over W ranks counts ``2 (W - 1)
    / W n``, what a ring sends.

    Arguments:
        factors: bytes at an update: contributions to factors.
        inverses: bytes at a refresh of all factors: parts of decompositions.
        gradients: bytes at every step: gradients, before and after preconditioning.
        agreement: bytes beside those, by which ranks agree.
    """

    factors: int
    inverses: int
    gradients: float
    agreement: Agreement


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that K-FAC takes of one rank's memory: what it keeps from step to step, and what it
    takes beside that at the busiest moment of each clock, all of which is gone before the next.

    Arguments:
        factors: kept: running averages.
        inverses: kept: decompositions.
        prepared: kept: what decomposed blocks make of their parts and the damping.
        stacks: kept: the two buffers of gradients that are preconditioned together, and those of
            the products.
        momentum: kept: what steps follow, of the blocks that this rank preconditions.
        sums: at an update: statistics of the step.
        update: beside the sums: buckets that are sent and received, and what they add up to.
        workspace: at a refresh: what a decomposition is made in, its parts among it.
        refresh: at a refresh, later: buckets of parts.
        apply: at every step: buckets of gradients, and what is gathered or gone after a product.
    """

    factors: int
    inverses: int
    prepared: int = 0
    stacks: int = 0
    momentum: int = 0
    sums: int = 0
    update: int = 0
    workspace: int = 0
    refresh: int = 0
    apply: int = 0

    @property
    def kept(self) -> int:
        """From step to step."""
        return self.factors + self.inverses + self.prepared + self.stacks + self.momentum

    @property
    def passing(self) -> int:
        """Beside that, at the busiest moment of a step."""
        return max(self.sums + self.update, self.workspace, self.refresh, self.apply)

    @property
    def total(self) -> int:
        """At the busiest moment of a step."""
        return self.kept + self.passing


@dataclass(frozen=True, slots=True)
class Work:
    """What one rank computes, in the units of the cost model: floating-point operations by default.

    Arguments:
        decompose: operations at a refresh of all factors.
        precondition: operations at every step.
    """

    decompose: float
    precondition: float


def agreement_of(plan: Travel, other_numbers: int) -> Agreement:
    """Bytes of the numbers, 8 bytes each, on which ranks agree.

    At an update: 11 for all; of every block whether it has a gradient and whether its statistics
    are finite; of every factor its terms and, for a unit, its size. At a refresh: who decomposed a
    factor and who failed. At every step: the samples, two numbers of what the model is, the blocks
    that have a gradient, and whether gradients that no rank has whole are finite.

    Arguments:
        plan: what the ranks do.
        other_numbers: how many numbers are in the gradients of parameters without a block.
    """
    world, blocks, factors = plan.world, len(plan.blocks), len(plan.factors)
    update = 11 + 2 * blocks + factors * (2 if world.units else 1)
    apply = (3 + blocks) * plan.travels
    apply += world.sharded and (other_numbers > 0 or not plan.travels)
    each = 8 * 2 * (plan.world_size - 1) / plan.world_size
    decomposed = sum(len(block.decomposed) for block in plan.blocks)
    return Agreement(update * each, 2 * decomposed * each, apply * each)
