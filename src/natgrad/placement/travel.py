"""What the ops of a plan send: how many numbers, in which buckets, by which route, and to whom."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import TypeVar

from natgrad.placement import flows, messages
from natgrad.placement.collectives import Collective, Flows
from natgrad.placement.ops import (
    ApplyOp,
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
from natgrad.placement.rank_arrays import Numbers
from natgrad.placement.routes import Groups, Route, Routes
from natgrad.placement.world import World
from natgrad.specs import BlockSpec, FactorSpec, Piece, Ranks, as_ranks, disjoint

AnyOp = TypeVar("AnyOp", bound=Op)
AnyNumbers = TypeVar("AnyNumbers", int, Numbers)


class Travel:
    """The part of a `Plan` that says what is sent."""

    world: World
    blocks: tuple[BlockSpec, ...]
    update: tuple[Reduce, ...]
    refresh: tuple[RefreshOp, ...]
    apply: tuple[ApplyOp, ...]
    routes: Routes

    @property
    def world_size(self) -> int:
        return self.world.size

    @cached_property
    def block(self) -> Mapping[str, BlockSpec]:
        return {block.name: block for block in self.blocks}

    @cached_property
    def factors(self) -> Mapping[FactorId, FactorSpec]:
        return {(block.name, name): spec for block in self.blocks for name, spec in block.factors}

    def numbers(self, op: Op) -> int:
        """How many numbers are in one copy of what an op sends, without the KL clip's; 0 if it
        sends nothing.

        Arguments:
            op: one of the plan's.
        """
        match op:
            case Gather() | Return(_, int()):
                return self.piece(op).numel
            case Reduce(factor):
                return self.factors[factor].on_wire
            case Share(factor, _, _, (start, stop)):
                return (stop - start) * self.factors[factor].dim
            case Share(factor):
                return self.factors[factor].parts
            case ReduceGradient(name):
                return self.block[name].numel
            case TotalGradients(names):
                return sum(self.block[name].numel for name in names)
            case _:
                return 0

    def piece(self, op: Gather | Return) -> Piece:
        """The piece of a gradient that an op moves.

        Arguments:
            op: one of the plan's, with a piece.
        """
        assert op.piece is not None
        return self.block[op.block].pieces[op.piece]

    def wire_bytes(self, op: Op, numbers: AnyNumbers) -> AnyNumbers:
        """Bytes of one message of an op: whole words, of which the last may have room left.

        Arguments:
            op: one of the plan's.
            numbers: how many are in the message, or in each of many.
        """
        world = self.world
        match op:
            case Reduce():
                word, each = world.factor_bytes, world.factors_per_word
            case Share():
                word, each = world.inverse_bytes, world.inverses_per_word
            case _:
                word, each = world.gradient_bytes, world.gradients_per_word
        return -(-numbers // each) * word

    def copy_bytes(self, op: Op) -> int:
        """Bytes of one copy of what an op sends, without the KL clip's number.

        Arguments:
            op: one of the plan's.
        """
        if (found := self._copy_bytes.get(op)) is None:
            found = self._copy_bytes[op] = self.wire_bytes(op, self.numbers(op))
        return found

    @cached_property
    def _copy_bytes(self) -> dict[Op, int]:
        """Asked for whenever ops are cut into buckets."""
        return {}

    def finished_bytes(self, op: Op) -> int:
        """Bytes of one number of a finished sum on the wire.

        Arguments:
            op: one that sums.
        """
        return self.world.sum_bytes if isinstance(op, Reduce) else self.world.gradient_sum_bytes

    def copied_numbers(self, op: Op) -> int:
        """How many numbers of an op are spread over a group, with that of the KL clip.

        Arguments:
            op: one that `groups` knows groups for.
        """
        return self.numbers(op) + (isinstance(op, Return) and len(self.clipped[op]) > 0)

    def sources(self, op: Op) -> Ranks:
        """The ranks that have what an op copies, one for each of its groups.

        Arguments:
            op: one that `groups` knows groups for.
        """
        if isinstance(op, Share):
            return range(op.source, op.source + 1)
        assert isinstance(op, Return)
        return op.sources

    def served(self, op: Return, source: int) -> range:
        """The ranks that a source serves, whether they hold the piece or not; itself is one.

        Arguments:
            op: one of the plan's.
            source: one of its sources.
        """
        index, count = op.sources.index(source), len(op.sources)
        first, last = (-(-k * self.world_size // count) for k in (index, index + 1))
        return range(first, last)

    # How it travels.

    def groups(self, op: Op) -> Groups | None:
        """The groups of ranks among which the copies of an op can be spread evenly; ``None`` if it
        sums, or if its copies go to ranks that make no such groups, and so go directly.

        Arguments:
            op: one of the plan's.
        """
        match op:
            case Share(_, _, to) if len(to) > 1:
                return Groups(to, 1)
            case Return(_, int(), sources, to) if len(to) > 1 and self.piece(op).chunk is None:
                if self.clipped[op] and self.clipped[op] != to:
                    return None
                if len(sources) == 1:
                    return Groups(to, 1)
                # Rows of a grid, each with its source at the same place.
                row = self.world_size // len(sources)
                column = range(sources[0], self.world_size, row)
                if to == self.world.ranks and sources == column and sources[0] < row > 1:
                    return Groups(to, len(sources))
        return None

    def has_two_routes(self, op: Op) -> bool:
        """Whether an op can go in even slices.

        Arguments:
            op: one of the plan's.
        """
        return isinstance(op, Reduce | ReduceGradient) or self.groups(op) is not None

    def sorted_by_route(
        self, ops: Iterable[AnyOp], routes: Routes | None = None
    ) -> tuple[list[AnyOp], list[AnyOp], dict[Groups, list[AnyOp]]]:
        """Ops that go directly; those whose sums are made in even slices; and by the groups that
        need them those whose copies are. In a world of one rank all are direct.

        Arguments:
            ops: some of the plan's, in its order, which is kept.
            routes: other ones than the plan's own.
        """
        routes = routes or self.routes
        direct: list[AnyOp] = []
        summed: list[AnyOp] = []
        copied: dict[Groups, list[AnyOp]] = {}
        for op in ops:
            if routes.of(op) is Route.DIRECT or self.world_size == 1:
                direct.append(op)
            elif isinstance(op, Reduce | ReduceGradient):
                summed.append(op)
            elif (groups := self.groups(op)) is None:
                direct.append(op)
            else:
                copied.setdefault(groups, []).append(op)
        return direct, summed, copied

    def cut(self, ops: Iterable[AnyOp]) -> tuple[tuple[AnyOp, ...], ...]:
        """The ops cut into buckets, each of which is one exchange: one copy of all that its ops
        send is at most ``bucket_bytes``, unless a single op is larger.

        Arguments:
            ops: in the order of the plan, which is kept.
        """
        cuts: list[list[AnyOp]] = []
        room = -1
        for op in ops:
            size = self.copy_bytes(op)
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
    def clipped(self) -> Mapping[Return, Ranks]:
        """The ranks to which a piece is the first of its block, so that the KL clip's number comes
        with it, whatever the exchange."""
        served: dict[str, list[Ranks]] = {block.name: [] for block in self.blocks}
        first: dict[Return, Ranks] = {}
        for op in self.apply:
            if isinstance(op, Return):
                earlier = [ranks for ranks in served[op.block] if not disjoint(ranks, op.to)]
                if op.to in earlier:
                    first[op] = range(0)
                elif earlier:
                    first[op] = as_ranks(r for r in op.to if not any(r in e for e in earlier))
                else:
                    first[op] = op.to
                served[op.block].append(op.to)
        return first

    def outgoing(self, ops: Iterable[Op], rank: int) -> Iterator[Message]:
        """What a rank sends for ops that go directly, in the order of the ops, and of the ranks
        within each of them. What an all-reduce sends is left to it.

        Arguments:
            ops: some of the plan's, in its order.
            rank: that sends.
        """
        return messages.outgoing(self, ops, rank)

    def incoming(self, ops: Iterable[Op], rank: int) -> Iterator[Message]:
        """What a rank receives for ops that go directly, in the same order.

        Arguments:
            ops: some of the plan's, in its order.
            rank: that receives.
        """
        return messages.incoming(self, ops, rank)

    def calls(self, ops: Iterable[Op]) -> list[Collective]:
        """The collectives of some ops, by the plan's own routes. Those of the last ones are kept:
        seconds and memory are counted one after the other, and each list is some hundred megabytes
        where there are many ranks.

        Arguments:
            ops: some of the plan's, in its order.
        """
        some = tuple(ops)
        kept = self.__dict__
        if kept.get("_calls_of") != some:
            self.forget_calls()  # before there are others
            ready: list[Collective] | None = kept.get("_counted", {}).pop(some, None)
            kept["_calls"] = flows.collectives_of(self, some) if ready is None else ready
            kept["_calls_of"] = some
        found: list[Collective] = kept["_calls"]
        return found

    def forget_calls(self) -> None:
        """Keep no collectives any longer."""
        self.__dict__.pop("_calls_of", None)
        self.__dict__.pop("_calls", None)

    def flows(self, ops: Iterable[Op]) -> Flows:
        """The bytes of some ops by rank, summed without listing the millions of messages of a large
        world.

        Arguments:
            ops: some of the plan's, in its order; all-reduces count nothing here.
        """
        return flows.flows_of(self, ops)

    @property
    def travels(self) -> bool:
        """Whether gradients leave their ranks at every step."""
        local = self.world.gradients_are_local
        moved = any(not isinstance(op, Precondition) for op in self.apply)
        return self.world_size > 1 and (local or moved)
