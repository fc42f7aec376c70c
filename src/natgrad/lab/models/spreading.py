"""The blocks of a model on one process as they would lie on many, for plans of machines that need
not be there."""

from dataclasses import replace
from enum import StrEnum

from natgrad import KFAC
from natgrad.placement import World
from natgrad.specs import BlockSpec, Piece


class Layout(StrEnum):
    """How gradients lie on the ranks: summed by DDP, sharded by FSDP, or each rank's own."""

    DDP = "ddp"
    FSDP = "fsdp"
    PLAIN = "plain"


def spread(kfac: KFAC, ranks: int, layout: Layout) -> tuple[tuple[BlockSpec, ...], World]:
    """Sizes of all blocks, and the world that they lie in.

    Arguments:
        kfac: of the model on one process; its weights may be on the meta device.
        ranks: how many there would be.
        layout: how gradients would lie on them.
    """
    sharded = layout is Layout.FSDP
    found = []
    for spec, block in zip(kfac.plan.blocks, kfac.blocks, strict=True):
        rows = [len(parameter) for parameter in block.parameters]
        pieces = (
            _sharded(piece, rows[piece.parameter], ranks)
            if sharded and ranks > 1
            else replace(piece, holders=range(ranks))
            for piece in spec.pieces
        )
        found.append(replace(spec, pieces=tuple(pieces)))
    local = layout is Layout.PLAIN and ranks > 1
    world = replace(kfac.plan.world, size=ranks, gradients_are_local=local, sharded=sharded)
    return tuple(found), world


def _sharded(piece: Piece, rows: int, ranks: int) -> Piece:
    """Rank r has the r-th of equal slices of a parameter's rows, the last of which may be short."""
    chunk = -(-rows // ranks)
    start, stop = piece.box[0]
    holders = range(start // chunk, -(-stop // chunk))
    return replace(piece, holders=holders, chunk=chunk if len(holders) > 1 else None)
