"""Sizes of factors and blocks, without their numbers: no tensors, no torch."""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from natgrad.errors import SettingError

Ranks = tuple[int, ...]


class FactorCost(NamedTuple):
    """What an inverse costs for one factor.

    Arguments:
        decompose: operations to decompose the factor once.
        apply: operations to apply it, for each number of the gradient, at every step.
    """

    decompose: float
    apply: float


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
    """

    dim: int
    batch: int
    numel: int
    diagonal: bool = False
    parts: int = 0
    sent: int | None = None
    cost: FactorCost | None = None

    @property
    def work(self) -> FactorCost:
        if self.cost is not None:
            return self.cost
        if self.diagonal:
            return FactorCost(float(self.batch * self.dim), 2.0)
        return FactorCost(25.0 * self.batch * float(self.dim) ** 3, 4.0 * self.dim)

    @property
    def on_wire(self) -> int:
        return self.numel if self.sent is None else self.sent


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of one of a block's parameters, and the ranks that hold its gradient.

    All ranks hold one whole piece under data parallelism, one rank each of many under FSDP; tensor
    parallelism gives every shard as many holders as there are replicas.

    Arguments:
        parameter: its index among the parameters of the block's layer.
        box: ``(start, stop)`` of every dimension.
        holders: ranks that hold its gradient.
    """

    parameter: int
    box: tuple[tuple[int, int], ...]  # (start, stop) per dimension
    holders: Ranks

    @property
    def numel(self) -> int:
        return prod(stop - start for start, stop in self.box)


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
        decomposed: names of those whose parts precondition, at least one.
        pieces: of the gradients of all its parameters.
        together: whether all its factors are decomposed on the same ranks, as they must be where
            some are merged.
        in_basis: names of those that are statistics in the eigenbasis of the decomposed ones.
    """

    name: str
    kind: str
    shape: tuple[int, int, int]  # groups, rows, columns
    factors: tuple[tuple[str, FactorSpec], ...]
    decomposed: tuple[str, ...]
    pieces: tuple[Piece, ...]
    together: bool = False
    in_basis: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.factors]
        if not self.decomposed or not {*self.decomposed, *self.in_basis} <= set(names):
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
