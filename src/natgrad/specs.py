"""Sizes of factors and blocks, without their numbers: no tensors, no torch.

A set of ranks is a ``range`` wherever it can be one: all of them, a row or a column of a grid,
every d-th. A plan for ten thousand ranks then has sets of ten thousand without listing them, and
asking whether a rank is in one takes no time.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

from natgrad.errors import SettingError
from natgrad.routines import FactorCost as FactorCost
from natgrad.routines import Routine as Routine

Ranks = tuple[int, ...] | range  # in increasing order
Box = tuple[tuple[int, int], ...]  # (start, stop) of every dimension


def as_ranks(ranks: Iterable[int]) -> Ranks:
    """The same set in the one way in which it is written: as a range if it is one.

    Arguments:
        ranks: in any order; those that occur twice count once.
    """
    if isinstance(ranks, range) and ranks.step > 0:
        return ranks
    found = sorted(set(ranks))
    if not found:
        return range(0)
    steps = {b - a for a, b in pairwise(found)}
    if len(steps) > 1:
        return tuple(found)
    return range(found[0], found[-1] + 1, steps.pop() if steps else 1)


def disjoint(one: Ranks, other: Ranks) -> bool:
    """Whether no rank is in both; at once for ranges of one step, as those of a grid are.

    Arguments:
        one: a set of ranks.
        other: another one.
    """
    if not one or not other or one[-1] < other[0] or other[-1] < one[0]:
        return True
    if isinstance(one, range) and isinstance(other, range):
        steps = {each.step for each in (one, other) if len(each) > 1}
        if len(steps) == 1 and (one[0] - other[0]) % steps.pop():
            return True
    few, many = sorted((one, other), key=len)
    return not any(rank in many for rank in few)


def server(sources: Ranks, rank: int, world: int) -> int:
    """Who serves a rank, of S ranks that have what it needs: number ``rank S // world``.

    In a grid whose columns are the sources, it is the one in the rank's own row; of the replicas of
    a shard, the one in its own replica of the model. So sources share the work, and what is served
    stays near.

    Arguments:
        sources: ranks that have it, at least one.
        rank: any.
        world: number of all ranks.
    """
    return sources[rank * len(sources) // world]


@dataclass(frozen=True, slots=True)
class FactorSpec:
    """Sizes of a factor: ``batch`` symmetric matrices ``[dim, dim]``.

    Arguments:
        dim: ``d``, rows of each matrix.
        batch: ``b``, how many matrices of that size.
        numel: numbers in which all of them are kept.
        diagonal: whether only the diagonals are there.
        parts: numbers of its decomposition.
        sent: numbers of it that travel; ``None`` is ``numel``.
        cost: as its inverse says (`Inverse.cost`); ``None`` is that of an eigendecomposition.
        workspace: numbers that are allocated at the busiest moment of its decomposition, as its
            inverse says (`Inverse.workspace`), the parts among them; ``None`` are those of an
            eigendecomposition.
    """

    dim: int
    batch: int
    numel: int
    diagonal: bool = False
    parts: int = 0
    sent: int | None = None
    cost: FactorCost | None = None
    workspace: int | None = None

    @property
    def room(self) -> int:
        if self.workspace is not None:
            return self.workspace
        return self.numel if self.diagonal else Routine.EIGEN.workspace(self.dim, self.batch)

    @property
    def work(self) -> FactorCost:
        if self.cost is not None:
            return self.cost
        if self.diagonal:
            return FactorCost(float(self.batch * self.dim), 2.0)
        by = Routine.EIGEN
        return FactorCost(self.batch * by.operations(self.dim), 4.0 * self.dim, by)

    @property
    def on_wire(self) -> int:
        return self.numel if self.sent is None else self.sent

    @property
    def can_be_split(self) -> bool:
        """Whether several ranks can decompose it together, each some rows of its inverse."""
        one = self.batch == 1 and not self.diagonal
        return one and self.cost is not None and self.cost.shared is not None

    def split(self, ranks: int) -> "FactorSpec":
        """What each of several ranks does of it; the factor itself for one.

        Arguments:
            ranks: how many decompose it together; more than one only where it `can_be_split`.
        """
        return self if ranks == 1 else _split(self, ranks)


@lru_cache(maxsize=256)  # of many equal layers, for every plan that is compared
def _split(spec: FactorSpec, ranks: int) -> FactorSpec:
    assert spec.cost is not None
    rows = -(-spec.dim // ranks)
    room = spec.cost.by.rows_workspace(spec.dim, rows)
    return replace(spec, parts=rows * spec.dim, cost=spec.cost.split(ranks), workspace=room)


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of one of a block's parameters, and the ranks that hold its gradient.

    Under data parallelism all ranks hold one whole piece. FSDP cuts a parameter's rows into chunks
    of one length, of which rank 0, 1, … holds one each: that is one piece, too, with a ``chunk``.
    Tensor parallelism gives every shard as many holders as there are replicas.

    Arguments:
        parameter: its index among the parameters of the block's layer.
        box: ``(start, stop)`` of every dimension.
        holders: ranks that hold its gradient: each all of it, or, with a ``chunk``, a part each, in
            the order of ranks.
        chunk: rows, counted from row 0 of the parameter, that a holder has; ``None`` if it has all
            of the box.
    """

    parameter: int
    box: Box
    holders: Ranks
    chunk: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "holders", as_ranks(self.holders))

    @property
    def numel(self) -> int:
        return prod(stop - start for start, stop in self.box)

    @property
    def row_numel(self) -> int:
        """Numbers of one row."""
        return prod(stop - start for start, stop in self.box[1:])

    def part(self, rank: int) -> Box:
        """The box that a holder has.

        Arguments:
            rank: one of the holders.
        """
        if self.chunk is None:
            return self.box
        (start, stop), *rest = self.box
        index = start // self.chunk + self.holders.index(rank)
        first, last = index * self.chunk, (index + 1) * self.chunk
        return ((max(start, first), min(stop, last)), *rest)

    def part_numel(self, rank: int) -> int:
        """Numbers that a holder has.

        Arguments:
            rank: one of the holders.
        """
        return prod(stop - start for start, stop in self.part(rank))

    def check(self, block: str, world: int) -> None:
        """Raise if the holders cannot be what they are said to be.

        Arguments:
            block: its name, for the sentence.
            world: number of ranks.
        """
        if not self.holders or self.holders[0] < 0 or self.holders[-1] >= world:
            raise SettingError(
                f"A piece of block {block!r} is held by ranks {tuple(self.holders)!r} but must be "
                f"held by some of the ranks 0 to {world - 1}: pass the holders as ranks of the "
                "group that shares the work."
            )
        if self.chunk is not None:
            (start, stop), *_ = self.box
            parts = -(-stop // self.chunk) - start // self.chunk
            if parts != len(self.holders):
                raise SettingError(
                    f"A piece of block {block!r} has rows {start} to {stop} in chunks of "
                    f"{self.chunk}, which makes {parts} parts, but {len(self.holders)} holders: "
                    "name one for each part."
                )


class AppliedRoom(NamedTuple):
    """Numbers that a decomposed block takes when it is applied, beside gradient and result.

    Arguments:
        prepared: kept until the parts or the damping change.
        scratch: of buffers that the products of all blocks share.
        passing: gone when the product is there, of a block whose ``prepared`` are made anew.
        at_once: of the gradient that go in at a time, where it is cut into slices; 0 is all of it.
    """

    prepared: int = 0
    scratch: int = 0
    passing: int = 0
    at_once: int = 0


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """The curvature block of one weight, and how its gradient lies on the ranks.

    Factors ``in_basis`` (EKFAC's S) need the parts of the others on every rank that sees data, and
    live where the block is preconditioned. Factors that are neither ``decomposed`` nor ``in_basis``
    are merged into decomposed ones first (a tied embedding's).

    Arguments:
        name: of the block, which no other one has.
        kind: class of the module, for print.
        shape: ``(groups, rows, cols)`` of the weight.
        factors: name and sizes of each.
        decomposed: names of those whose parts precondition, at least one if there are factors.
        pieces: of the gradients of all its parameters.
        together: whether all its factors are decomposed on the same ranks, as they must be where
            some are merged.
        in_basis: names of those that are statistics in the eigenbasis of the decomposed ones.
        applied: numbers that preconditioning takes beside its gradient.
        moments: numbers that steps keep: momentum, and what a geometry adds.
        operations: of a step, beside products with the factors, such as those of a polar factor.
    """

    name: str
    kind: str
    shape: tuple[int, int, int]  # groups, rows, columns
    factors: tuple[tuple[str, FactorSpec], ...]
    decomposed: tuple[str, ...]
    pieces: tuple[Piece, ...]
    together: bool = False
    in_basis: tuple[str, ...] = ()
    applied: AppliedRoom = field(default=AppliedRoom())
    moments: int = 0
    operations: float = 0.0

    def __post_init__(self) -> None:
        names = [name for name, _ in self.factors]
        none = bool(names) and not self.decomposed
        if none or not {*self.decomposed, *self.in_basis} <= set(names):
            raise SettingError(
                f"Block {self.name!r} decomposes {self.decomposed!r} and has {self.in_basis!r} in "
                f"their basis, but its factors are {names!r}: decompose at least one of these and "
                "name no others."
            )
        if self.merged and not self.together:
            raise SettingError(
                f"Block {self.name!r} merges {self.merged!r} into the factors that are decomposed, "
                "which needs all of them at one rank: pass together=True."
            )

    @property
    def numel(self) -> int:
        """Numbers in the gradients of its parameters."""
        return sum(piece.numel for piece in self.pieces)

    @property
    def basis_everywhere(self) -> bool:
        return bool(self.in_basis)

    @property
    def merged(self) -> tuple[str, ...]:
        """The factors that become part of others before these are decomposed."""
        apart = {*self.decomposed, *self.in_basis}
        return tuple(name for name, _ in self.factors if name not in apart)

    def factor(self, name: str) -> FactorSpec:
        """The sizes of a factor.

        Arguments:
            name: of one of ``factors``.
        """
        return dict(self.factors)[name]
