"""What one rank sends to another, message by message: the direct route.

    Reduce, ReduceGradient    from every rank to every rank that keeps the sum
    Share                     from the rank that decomposed to all others that precondition
    Gather                    from the holder of a piece in a rank's row, or from all of its chunks
    Return                    from the worker in a rank's own row

Every rank lists its own messages alone, so that the list is as long as what it does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from natgrad.placement.ops import Gather, Message, Op, Reduce, ReduceGradient, Return, Share
from natgrad.specs import server

if TYPE_CHECKING:
    from natgrad.placement.travel import Travel


def outgoing(plan: Travel, ops: Iterable[Op], rank: int) -> Iterator[Message]:
    """All messages of a rank, in the order of the ops, and of the receivers within each of them.

    Arguments:
        plan: what the ranks do.
        ops: some of the plan's, in its order.
        rank: that sends.
    """
    for op in ops:
        match op:
            case Reduce(_, to) | ReduceGradient(_, to):
                numel = plan.numbers(op)
                yield from (Message(op, rank, other, numel) for other in to if other != rank)
            case Share(_, source, to) if source == rank:
                numel = plan.numbers(op)
                yield from (Message(op, rank, other, numel) for other in to if other != rank)
            case Gather(_, _, to):
                piece = plan.piece(op)
                if rank in piece.holders:
                    numel = piece.part_numel(rank)
                    for other in to:
                        if other != rank and _gets(plan, op, other, rank):
                            yield Message(op, rank, other, numel)
            case Return(_, _, sources, to) if rank in sources:
                others = (other for other in plan.served(op, rank) if other != rank)
                yield from (_returned(plan, op, rank, other) for other in others if other in to)
            case _:
                pass


def incoming(plan: Travel, ops: Iterable[Op], rank: int) -> Iterator[Message]:
    """All messages to a rank, in the order of the ops, and of the senders within each of them.

    Arguments:
        plan: what the ranks do.
        ops: some of the plan's, in its order.
        rank: that receives.
    """
    for op in ops:
        match op:
            case Reduce(_, to) | ReduceGradient(_, to) if rank in to:
                numel = plan.numbers(op)
                others = (other for other in plan.world.ranks if other != rank)
                yield from (Message(op, other, rank, numel) for other in others)
            case Share(_, source, to) if rank in to and source != rank:
                yield Message(op, source, rank, plan.numbers(op))
            case Gather(_, _, to) if rank in to:
                piece = plan.piece(op)
                for holder in piece.holders:
                    if holder != rank and _gets(plan, op, rank, holder):
                        yield Message(op, holder, rank, piece.part_numel(holder))
            case Return(_, _, _, to) if rank in to:
                source = server(op.sources, rank, plan.world_size)
                if source != rank:
                    yield _returned(plan, op, source, rank)
            case _:
                pass


def _gets(plan: Travel, op: Gather, rank: int, holder: int) -> bool:
    """Whether a rank that is to have a piece gets something of it from a holder."""
    piece = plan.piece(op)
    if piece.chunk is not None:
        return True
    having = piece.holders
    return rank not in having and server(having, rank, plan.world_size) == holder


def _returned(plan: Travel, op: Return, source: int, rank: int) -> Message:
    clip = rank in plan.clipped[op]
    numel = 0 if op.piece is None else plan.piece(op).part_numel(rank)
    return Message(op, source, rank, numel + clip, clip)
