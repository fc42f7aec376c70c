"""The words of a plan: what is done by whom, and what travels from whom to whom."""

from dataclasses import dataclass

from natgrad.specs import Ranks

FactorId = tuple[str, str]  # (block, factor)


@dataclass(frozen=True, slots=True)
class Reduce:
    """Everyone's contribution to a factor is added up at each of ``to``, which keep it."""

    factor: FactorId
    to: Ranks


@dataclass(frozen=True, slots=True)
class Decompose:
    """By all of ``ranks``, which have the same numbers and so get the same parts."""

    factor: FactorId
    ranks: Ranks


@dataclass(frozen=True, slots=True)
class Share:
    """The parts of a decomposition go to ranks that did not make it."""

    factor: FactorId
    source: int
    to: Ranks


@dataclass(frozen=True, slots=True)
class TotalGradients:
    """Local gradients of ``blocks`` are added up everywhere, by one all-reduce."""

    blocks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReduceGradient:
    """Local gradients of a block are added up at each of ``to``."""

    block: str
    to: Ranks


@dataclass(frozen=True, slots=True)
class Gather:
    """A piece of the gradient goes to ranks that precondition the block and do not hold it."""

    block: str
    piece: int
    source: int
    to: Ranks


@dataclass(frozen=True, slots=True)
class Precondition:
    block: str
    ranks: Ranks


@dataclass(frozen=True, slots=True)
class Return:
    """A preconditioned piece goes to holders that did not precondition the block.

    The first piece of a block that a rank gets is followed by one number, the block's share of the
    KL clip, which every rank needs. ``piece`` is ``None`` for ranks that hold none of the block's
    gradient and get only this number."""

    block: str
    piece: int | None
    source: int
    to: Ranks


RefreshOp = Decompose | Share
ApplyOp = TotalGradients | ReduceGradient | Gather | Precondition | Return
Op = Reduce | RefreshOp | ApplyOp


@dataclass(frozen=True, slots=True)
class Message:
    """``numel`` numbers of one op from one rank to another; ``clip`` if the last of them is the
    block's share of the KL clip."""

    op: Op
    source: int
    to: int
    numel: int
    clip: bool = False
