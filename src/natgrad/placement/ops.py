"""The ops of a plan: what is done by which ranks, and what is sent from which rank to which.

    update     Reduce                                   contributions to factors, a reduce-scatter
    refresh    Decompose, Share                         parts of decompositions, a broadcast
    apply      TotalGradients                           local gradients, an all-reduce
               or ReduceGradient, Gather                gradients to where they are preconditioned
               Precondition
               Return                                   preconditioned gradients, an all-gather

Ranks are tuples in increasing order.
"""

from dataclasses import dataclass

from natgrad.specs import Ranks

FactorId = tuple[str, str]  # (block, factor)


@dataclass(frozen=True, slots=True)
class Reduce:
    """All ranks' contributions to a factor are summed at some ranks, which keep it: a
    reduce-scatter.

    Arguments:
        factor: ``(block, factor)``, both by name.
        to: ranks that get the sum and keep the factor's running average, in increasing order.
    """

    factor: FactorId
    to: Ranks


@dataclass(frozen=True, slots=True)
class Decompose:
    """Some ranks decompose a factor. They have the same numbers, so they get the same parts.

    Arguments:
        factor: ``(block, factor)``, both by name.
        ranks: that do it, in increasing order; each has the factor's running average.
    """

    factor: FactorId
    ranks: Ranks


@dataclass(frozen=True, slots=True)
class Share:
    """A rank sends the parts of a decomposition to ranks that did not make it: a broadcast.

    Arguments:
        factor: ``(block, factor)``, both by name.
        source: one of the ranks that decomposed it.
        to: ranks that receive, in increasing order, without ``source``.
    """

    factor: FactorId
    source: int
    to: Ranks


@dataclass(frozen=True, slots=True)
class TotalGradients:
    """Local gradients are summed everywhere, by one all-reduce.

    Arguments:
        blocks: names of the blocks whose gradients are summed.
    """

    blocks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReduceGradient:
    """Local gradients of a block are summed at the ranks that precondition it.

    Arguments:
        block: name of the block.
        to: ranks that get the sum and precondition the block, in increasing order.
    """

    block: str
    to: Ranks


@dataclass(frozen=True, slots=True)
class Gather:
    """A piece of a sharded gradient goes to ranks that precondition the block and do not hold it.

    Arguments:
        block: name of the block.
        piece: index into ``BlockSpec.pieces``.
        source: one of the ranks that hold the piece.
        to: ranks that receive, in increasing order; none of them holds the piece.
    """

    block: str
    piece: int
    source: int
    to: Ranks


@dataclass(frozen=True, slots=True)
class Precondition:
    """Some ranks precondition the gradient of a block.

    Arguments:
        block: name of the block.
        ranks: that do it, in increasing order.
    """

    block: str
    ranks: Ranks


@dataclass(frozen=True, slots=True)
class Return:
    """A preconditioned piece goes to holders that did not precondition the block.

    The first piece of a block that a rank gets is followed by one number, the block's share of the
    KL clip, which every rank needs.

    Arguments:
        block: name of the block.
        piece: index into ``BlockSpec.pieces``; ``None`` for ranks that hold none of the block's
            gradient and get the KL clip's number alone.
        source: one of the ranks that preconditioned the block.
        to: ranks that receive, in increasing order; none of them preconditioned it.
    """

    block: str
    piece: int | None
    source: int
    to: Ranks


RefreshOp = Decompose | Share
ApplyOp = TotalGradients | ReduceGradient | Gather | Precondition | Return
Op = Reduce | RefreshOp | ApplyOp


@dataclass(frozen=True, slots=True)
class Message:
    """What one op sends from one rank to another.

    Arguments:
        op: what it is sent for.
        source: the rank that sends.
        to: the rank that receives.
        numel: how many numbers, with that of the KL clip.
        clip: whether the last of them is the block's share of the KL clip.
    """

    op: Op
    source: int
    to: int
    numel: int
    clip: bool = False
