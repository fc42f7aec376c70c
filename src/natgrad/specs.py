"""Sizes of factors and blocks, without their numbers: no tensors, no torch."""

from dataclasses import dataclass
from math import prod

from natgrad.errors import SettingError

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FactorSpec:
    """``batch`` symmetric matrices of size ``dim``, kept as ``numel`` numbers altogether.

    ``parts``: how many numbers its decomposition has; ``sent``: how many travel, if not all."""

    dim: int
    batch: int
    numel: int
    diagonal: bool = False
    parts: int = 0
    sent: int | None = None

    @property
    def on_wire(self) -> int:
        return self.numel if self.sent is None else self.sent


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of one of a block's parameters, and the ranks that hold its gradient.

    All ranks hold one whole piece under data parallelism, one rank each of many under FSDP; tensor
    parallelism gives every shard as many holders as there are replicas."""

    parameter: int
    box: tuple[tuple[int, int], ...]  # (start, stop) per dimension
    holders: Ranks

    @property
    def numel(self) -> int:
        return prod(stop - start for start, stop in self.box)


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """The curvature block of one weight, and how its gradient lies on the ranks.

    ``decomposed`` factors are those whose parts precondition. Factors ``in_basis`` (EKFAC's S) are
    statistics in the basis of those parts, so every rank that sees data needs the parts, and they
    live where the block is preconditioned. All others are merged into decomposed ones first (a tied
    embedding's), for which a block is kept ``together``: all its factors go to the same ranks."""

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
        return dict(self.factors)[name]
