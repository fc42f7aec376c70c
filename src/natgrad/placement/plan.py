"""What every rank does, as frozen data on three clocks: update factors, refresh their inverses,
apply them. The executor runs it, the simulator prices it, a reader prints or draws it.

Keepers have a factor's running average, decomposers decompose it, holders have the parts; workers
precondition a block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, TypeVar

from natgrad.placement import picture, table
from natgrad.placement.amounts import Flows, Kept, Sent, Work, agreement_of, flows_of
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
from natgrad.placement.world import World
from natgrad.specs import BlockSpec, FactorSpec, Ranks
from natgrad.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AnyOp = TypeVar("AnyOp", bound=Op)


@dataclass(frozen=True)
class Plan:
    """What every rank does. All ranks have the same plan, with the ops in the same order.

    Arguments:
        strategy: name of the placement, for print.
        world: number of ranks, bytes of a number, and how gradients lie on the ranks.
        blocks: sizes of all blocks, in the order of the model.
        update: ops on steps that update factors, last layers first, as a backward pass meets them.
        refresh: ops on steps that decompose factors.
        apply: ops on every step.
    """

    strategy: str
    world: World
    blocks: tuple[BlockSpec, ...]
    update: tuple[Reduce, ...]
    refresh: tuple[RefreshOp, ...]
    apply: tuple[ApplyOp, ...]

    @property
    def world_size(self) -> int:
        return self.world.size

    @cached_property
    def block(self) -> Mapping[str, BlockSpec]:
        return {block.name: block for block in self.blocks}

    @cached_property
    def factors(self) -> Mapping[FactorId, FactorSpec]:
        return {(block.name, name): spec for block in self.blocks for name, spec in block.factors}

    # Who has what.

    @cached_property
    def workers(self) -> Mapping[str, Ranks]:
        """Who preconditions a block."""
        return {op.block: op.ranks for op in self.apply if isinstance(op, Precondition)}

    @cached_property
    def decomposers(self) -> Mapping[FactorId, Ranks]:
        return {op.factor: op.ranks for op in self.refresh if isinstance(op, Decompose)}

    @cached_property
    def keepers(self) -> Mapping[FactorId, Ranks]:
        """Where a factor's running average lives: where it is summed, or else used."""
        kept = {op.factor: op.to for op in self.update}
        for block in self.blocks:
            for name, _ in block.factors:
                used = block.decomposed[0] if name in block.merged else name
                if name in block.in_basis:
                    kept.setdefault((block.name, name), self.workers[block.name])
                else:
                    kept.setdefault((block.name, name), self.decomposers[block.name, used])
        return kept

    @cached_property
    def holders(self) -> Mapping[FactorId, Ranks]:
        """Where the parts of a decomposition live. Those of a factor in the basis of others are its
        own numbers, at hand where it is kept."""
        held: dict[FactorId, set[int]] = {f: set(ranks) for f, ranks in self.decomposers.items()}
        for op in self.refresh:
            if isinstance(op, Share):
                held[op.factor].update(op.to)
        for block in self.blocks:
            for name in block.in_basis:
                held[block.name, name] = set(self.keepers[block.name, name])
        return {factor: tuple(sorted(ranks)) for factor, ranks in held.items()}

    @cached_property
    def _kept(self) -> list[Kept]:
        factors, inverses = [0] * self.world_size, [0] * self.world_size
        for factor, spec in self.factors.items():
            for rank in self.keepers[factor]:
                factors[rank] += spec.numel * self.world.kept_factor_bytes
            for rank in self.holders.get(factor, ()):
                inverses[rank] += spec.parts * self.world.kept_inverse_bytes
        return [Kept(*both) for both in zip(factors, inverses, strict=True)]

    def memory(self, rank: int) -> Kept:
        """Bytes of running averages and of decompositions that a rank keeps.

        Arguments:
            rank: from 0 to ``world_size - 1``.
        """
        return self._kept[rank]

    def work(self, rank: int, cost: CostModel | None = None) -> Work:
        """What a rank computes at a refresh of all factors, and at every step.

        Arguments:
            rank: from 0 to ``world_size - 1``.
            cost: what decompositions and preconditioning cost; ``None`` is ``Flops()``.
        """
        cost = cost or Flops()
        return Work(
            sum(
                cost.decompose(self.factors[factor])
                for factor, ranks in self.decomposers.items()
                if rank in ranks
            ),
            sum(
                cost.precondition(self.block[name])
                for name, ranks in self.workers.items()
                if rank in ranks
            ),
        )

    # What is sent.

    def numbers(self, op: Op) -> int:
        """How many numbers are in one copy of what an op sends, without the KL clip's; 0 if it
        sends nothing.

        Arguments:
            op: one of the plan's.
        """
        match op:
            case Gather(name, int(piece)) | Return(name, int(piece)):
                return self._numels[name][piece]
            case Reduce(factor):
                return self.factors[factor].on_wire
            case Share(factor):
                return self.factors[factor].parts
            case ReduceGradient(name):
                return self.block[name].numel
            case TotalGradients(names):
                return sum(self.block[name].numel for name in names)
            case _:
                return 0

    @cached_property
    def _numels(self) -> Mapping[str, list[int]]:
        """Of the pieces of a block: of those there may be tens of thousands, asked for often."""
        return {block.name: [piece.numel for piece in block.pieces] for block in self.blocks}

    def number_bytes(self, op: Op) -> int:
        """Bytes of one number of an op on the wire.

        Arguments:
            op: one of the plan's.
        """
        match op:
            case Reduce():
                return self.world.factor_bytes
            case Share():
                return self.world.inverse_bytes
            case _:
                return self.world.gradient_bytes

    def cut(self, ops: Iterable[AnyOp]) -> tuple[tuple[AnyOp, ...], ...]:
        """The ops cut into buckets, each of which is one exchange: one copy of all that its ops
        send is at most ``bucket_bytes``, unless a single op is larger.

        Arguments:
            ops: in the order of the plan, which is kept.
        """
        cuts: list[list[AnyOp]] = []
        room = -1
        for op in ops:
            size = self.numbers(op) * self.number_bytes(op)
            if size > room or not cuts:
                cuts.append([])
                room = self.world.bucket_bytes
            cuts[-1].append(op)
            room -= size
        return tuple(map(tuple, cuts))

    @cached_property
    def buckets(self) -> tuple[tuple[FactorId, ...], ...]:
        """The factors of one exchange each, in the order in which a backward pass ends them."""
        return tuple(tuple(op.factor for op in ops) for ops in self.cut(self.update))

    @cached_property
    def clipped(self) -> Mapping[Return, frozenset[int]]:
        """The ranks to which a piece is the first of its block, so that the KL clip's number comes
        with it, whatever the exchange."""
        served: dict[str, set[int]] = {block.name: set() for block in self.blocks}
        first = {}
        for op in self.apply:
            if isinstance(op, Return):
                first[op] = frozenset(op.to) - served[op.block]
                served[op.block].update(op.to)
        return first

    def messages(self, ops: Iterable[Op]) -> Iterator[Message]:
        """Everything that ops send from rank to rank, in the order of the ops, and of the ranks
        within each of them. What an all-reduce sends is left to it.

        Arguments:
            ops: some of the plan's, in its order.
        """
        for op in ops:
            numel = self.numbers(op)
            match op:
                case Reduce(_, to) | ReduceGradient(_, to):
                    pairs = ((source, rank) for source in self.world.ranks for rank in to)
                    yield from (Message(op, *pair, numel) for pair in pairs if pair[0] != pair[1])
                case Share(_, source, to) | Gather(_, _, source, to):
                    yield from (Message(op, source, rank, numel) for rank in to)
                case Return(_, _, source, to):
                    for rank in to:
                        clip = rank in self.clipped[op]
                        yield Message(op, source, rank, numel + clip, clip)
                case _:
                    pass

    def flows(self, ops: Iterable[Op]) -> Flows:
        """The bytes of all messages by rank, summed without listing the millions of messages of a
        large world.

        Arguments:
            ops: some of the plan's, in its order; all-reduces count nothing here.
        """
        return flows_of(self, ops)

    def all_reduced(self, other_numbers: int = 0) -> int:
        """Bytes of gradients in the all-reduce of every step; 0 unless gradients are local.

        Arguments:
            other_numbers: how many numbers are in the gradients of parameters without a block,
                which are summed as well where gradients are local.
        """
        if not self.world.gradients_are_local or self.world_size == 1:
            return 0
        numbers = sum(self.numbers(op) for op in self.apply if isinstance(op, TotalGradients))
        return (numbers + other_numbers) * self.world.gradient_bytes

    def sent(self, rank: int, other_numbers: int = 0) -> Sent:
        """Bytes that a rank sends at an update, at a refresh of all factors, and at every step.

        Arguments:
            rank: from 0 to ``world_size - 1``.
            other_numbers: how many numbers are in the gradients of parameters without a block.
        """
        return self.sent_by_all(other_numbers)[rank]

    def sent_by_all(self, other_numbers: int = 0) -> list[Sent]:
        """`sent` of every rank.

        Arguments:
            other_numbers: how many numbers are in the gradients of parameters without a block.
        """
        reduced = 2 * (self.world_size - 1) * self.all_reduced(other_numbers) / self.world_size
        flows = zip(*(self.flows(ops).sent for ops in self._clocks), strict=True)
        agreement = agreement_of(self, other_numbers)
        return [Sent(u, r, apply + reduced, agreement) for u, r, apply in flows]

    @property
    def travels(self) -> bool:
        """Whether gradients leave their ranks at every step."""
        local = self.world.gradients_are_local
        moved = any(not isinstance(op, Precondition) for op in self.apply)
        return self.world_size > 1 and (local or moved)

    @property
    def _clocks(self) -> tuple[Sequence[Op], ...]:
        return self.update, self.refresh, self.apply

    # Other readers.

    def fingerprint(self) -> int:
        """Equal plans, equal numbers; fits an int64."""
        digest = hashlib.sha256(repr(self).encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1

    def table(self) -> Table:
        """Which ranks keep, decompose, hold and apply every factor."""
        return table.by_factor(self)

    def by_rank(self) -> Table:
        """What every rank keeps, sends and computes."""
        return table.by_rank(self)

    def __str__(self) -> str:
        return f"{self.table()}\n\n{self.by_rank()}"

    def draw(self, path: str | PathLike[str] | None = None) -> Figure:
        """A ``matplotlib`` figure: which rank does what for every block, and what it keeps.

        Arguments:
            path: file to write, whose ending says the format, such as ``plan.png``; ``None`` writes
                none.
        """
        return picture.draw(self, path)
