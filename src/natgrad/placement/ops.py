"""The ops of a plan: what is done by which ranks, and what is sent from which rank to which.

    update     Reduce                                   contributions to factors, a reduce-scatter
    refresh    Decompose, Share                         parts of decompositions, a broadcast
    apply      TotalGradients                           local gradients, an all-reduce
               or ReduceGradient, Gather                gradients to where they are preconditioned
               Precondition
               Return                                   preconditioned gradients, an all-gather

An op says who needs what from whom, once for all ranks, so that a plan has as many ops for ten
thousand ranks as for two. How it travels is the plan's `Route`.
"""

from dataclasses import dataclass

from natgrad.specs import Ranks, as_ranks

FactorId = tuple[str, str]  # (block, factor)
Rows = tuple[int, int]  # (start, stop)


@dataclass(frozen=True, slots=True)
class Reduce:
    """All ranks' contributions to a factor are summed at some ranks, which keep it: a
    reduce-scatter.

    Arguments:
        factor: ``(block, factor)``, both by name.
        to: ranks that get the sum and keep the factor's running average.
    """

    factor: FactorId
    to: Ranks

    def __post_init__(self) -> None:
        object.__setattr__(self, "to", as_ranks(self.to))


@dataclass(frozen=True, slots=True)
class Decompose:
    """A rank decomposes a factor, or makes some rows of its inverse, where several ranks do so
    together.

    Arguments:
        factor: ``(block, factor)``, both by name.
        rank: that does it, and has the factor's running average.
        rows: of the inverse; ``None`` are all.
    """

    factor: FactorId
    rank: int
    rows: Rows | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """A rank sends the parts of a decomposition to ranks that did not make it: a broadcast.

    Arguments:
        factor: ``(block, factor)``, both by name.
        source: the rank that decomposed it.
        to: ranks that have the parts afterwards, with ``source``.
        rows: of the inverse, which ``source`` has made; ``None`` are all parts.
    """

    factor: FactorId
    source: int
    to: Ranks
    rows: Rows | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "to", as_ranks(self.to))


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
        to: ranks that get the sum and precondition the block.
    """

    block: str
    to: Ranks

    def __post_init__(self) -> None:
        object.__setattr__(self, "to", as_ranks(self.to))


@dataclass(frozen=True, slots=True)
class Gather:
    """A piece of a sharded gradient goes to ranks that precondition the block and do not hold it.

    A rank gets it from the holder that serves it (`natgrad.specs.server`); a piece in chunks comes
    from all holders.

    Arguments:
        block: name of the block.
        piece: index into ``BlockSpec.pieces``.
        to: ranks that have all of the piece afterwards; those among them that hold it receive
            nothing.
    """

    block: str
    piece: int
    to: Ranks

    def __post_init__(self) -> None:
        object.__setattr__(self, "to", as_ranks(self.to))


@dataclass(frozen=True, slots=True)
class Precondition:
    """Some ranks precondition the gradient of a block.

    Arguments:
        block: name of the block.
        ranks: that do it.
    """

    block: str
    ranks: Ranks

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", as_ranks(self.ranks))


@dataclass(frozen=True, slots=True)
class Return:
    """A preconditioned piece goes to holders that did not precondition the block.

    In a grid whose columns are the sources, each serves its row (`natgrad.specs.server`). The first
    piece of a block that a rank gets is followed by one number, the block's share of the KL clip,
    which every rank needs.

    Arguments:
        block: name of the block.
        piece: index into ``BlockSpec.pieces``; ``None`` for ranks that hold none of the block's
            gradient and get the KL clip's number alone.
        sources: the ranks that preconditioned the block.
        to: holders of the piece; those that are their own source receive nothing.
    """

    block: str
    piece: int | None
    sources: Ranks
    to: Ranks

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", as_ranks(self.sources))
        object.__setattr__(self, "to", as_ranks(self.to))


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
