"""How the ops of a clock travel: each message by itself, or in even slices.

    DIRECT      one all-to-all, in which every rank sends what the other needs. An owner receives
                W - 1 whole shares of a factor, or sends W - 1 copies of its inverse.
    BALANCED    of a bucket of n numbers: sums by a reduce-scatter, after which every rank has added
                up n / W of it, and an all-to-all of finished slices to the owners; copies the other
                way round, slices to all that need them and an all-gather among these.

In the second no rank sends or receives more than the bucket and what it owns, whatever W is and
however unevenly ranks own. In a small world the first one is often less: with W equal owners both
move ``(W - 1) / W`` of the bucket, and the second moves finished slices besides. The plan has the
one whose busiest rank is done first.
"""

from collections.abc import Collection
from dataclasses import dataclass, fields
from enum import Enum

from natgrad.placement.ops import Op, Reduce, ReduceGradient, Return, Share
from natgrad.specs import Ranks, as_ranks


class Route(Enum):
    """How ops travel: ``DIRECT``, by one all-to-all, or ``BALANCED``, in even slices."""

    DIRECT = "direct"
    BALANCED = "balanced"

    def __repr__(self) -> str:
        return f"Route.{self.name}"


@dataclass(frozen=True, slots=True)
class Routes:
    """The route of every kind of op that one rank may need from many, or many from one. What shards
    send (`Gather`) is always direct: nobody gets it twice.

    Arguments:
        factors: of `Reduce`.
        inverses: of `Share`.
        sums: of `ReduceGradient`.
        results: of `Return`.
    """

    factors: Route = Route.DIRECT
    inverses: Route = Route.DIRECT
    sums: Route = Route.DIRECT
    results: Route = Route.DIRECT

    def of(self, op: Op) -> Route:
        """The route of an op.

        Arguments:
            op: one of a plan's.
        """
        name = KINDS.get(type(op))
        route: Route = Route.DIRECT if name is None else getattr(self, name)
        return route

    @property
    def balanced(self) -> tuple[str, ...]:
        """What travels in even slices."""
        names = (field.name for field in fields(self))
        return tuple(name for name in names if getattr(self, name) is Route.BALANCED)


ALL_DIRECT = Routes()

# Buckets of sums that are under way at a time. More would fill a rank's memory with what it has
# received and not added up; with fewer a link would wait for the rank. Small ones need not wait.
IN_FLIGHT = 4
_FEW_BYTES = 256 << 10


def may_leave(size: int, under_way: Collection[int]) -> bool:
    """Whether a bucket of sums may leave while others are under way.

    Arguments:
        size: bytes of one copy of it.
        under_way: those of the others.
    """
    return len(under_way) < IN_FLIGHT or sum(under_way) + size <= _FEW_BYTES


KINDS: dict[type[Op], str] = {
    Reduce: "factors",
    Share: "inverses",
    ReduceGradient: "sums",
    Return: "results",
}


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of ranks that need the same copies: disjoint, of one size, and each with a source
    of its own for every op.

    Arguments:
        members: all ranks that are in one of them.
        count: how many there are. Each has the next ``len(members) / count`` of the ranks.
    """

    members: Ranks
    count: int

    @property
    def size(self) -> int:
        return len(self.members) // self.count

    def of(self, rank: int) -> Ranks | None:
        """The group of a rank, if it is in one.

        Arguments:
            rank: any.
        """
        if rank not in self.members:
            return None
        index = self.members.index(rank) // self.size
        return as_ranks(self.members[index * self.size : (index + 1) * self.size])
