"""The ranks that train together, what the plan gives to each of them, and what travels."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from math import prod

import torch
from torch import Tensor, nn

from natgrad.comm.base import Communicator, Pending
from natgrad.comm.layouts import (
    Box,
    DeviceMesh,
    ProcessGroup,
    box_of,
    gradients_are_local,
    is_sharded,
)
from natgrad.errors import SettingError
from natgrad.inverses import Inverse
from natgrad.layers.base import real
from natgrad.placement import Plan, Strategy, World
from natgrad.placement.ops import Message, Op
from natgrad.runtime.agreement import Together
from natgrad.runtime.blocks import Block
from natgrad.runtime.ranges import check_whole
from natgrad.runtime.settings import Clocks
from natgrad.specs import BlockSpec, FactorSpec, Piece

Group = Communicator | ProcessGroup | DeviceMesh | None


@dataclass(frozen=True)
class Wire:
    """How statistics travel: ``packed`` sends triangles and not the kept form, in buckets of about
    ``bucket_bytes``, one exchange each. Neither changes a result."""

    packed: bool = True
    bucket_bytes: int = 25 << 20

    def __post_init__(self) -> None:
        check_whole(self.bucket_bytes, "Wire.bucket_bytes", low=1)


class Team:
    """``keeps``, ``decomposes``: names of factors by block; ``applies``: blocks, all of this rank.

    All ranks make it together, and find out there if they were given different things.
    """

    def __init__(
        self,
        comm: Communicator,
        blocks: list[Block],
        placement: Strategy,
        world: World,
        wire: Wire,
        wire_dtype: torch.dtype | None,
    ) -> None:
        self.comm, self.rank, self.size, self.wire = comm, comm.rank, comm.size, wire
        dtypes = [torch.promote_types(block.dtype, torch.float32) for block in blocks]
        self.dtype = _promoted(dtypes)  # of decompositions
        self.sum_dtype = _promoted(real(p.dtype) for b in blocks for p in b.parameters)
        self.wire_dtype = wire_dtype or self.sum_dtype
        self.units = self.wire_dtype == torch.float16  # too narrow for numbers as they are
        self.gradient_dtype = _promoted(p.dtype for b in blocks for p in b.parameters)
        boxes = comm.gather([_boxes(block) for block in blocks])
        specs = [
            _spec(block, [theirs[index] for theirs in boxes], wire)
            for index, block in enumerate(blocks)
        ]
        world = replace(
            world,
            factor_bytes=self.wire_dtype.itemsize,
            inverse_bytes=self.dtype.itemsize,
            gradient_bytes=self.gradient_dtype.itemsize,
            kept_factor_bytes=blocks[0].dtype.itemsize,
            kept_inverse_bytes=self.dtype.itemsize,
            bucket_bytes=wire.bucket_bytes,
            units=self.units,
        )
        with Together(comm) as agreed:
            self.plan: Plan = placement(specs, world)
            agreed.words = {
                "who adds up gradients": "K-FAC" if world.gradients_are_local else "DDP or FSDP",
                "placement": self.plan.strategy,
                "wire": repr(wire),
                "the plan": f"{self.plan.fingerprint():x}",
            }
        self.blocks = {block.name: block for block in blocks}
        self.order = {block: index for index, block in enumerate(blocks)}
        plan, rank = self.plan, self.rank
        self.keeps = {b: {n for n in b.factors if rank in plan.keepers[b.name, n]} for b in blocks}
        self.decomposes = {
            b: {n for n in b.factors if rank in plan.decomposers.get((b.name, n), ())}
            for b in blocks
        }
        self.applies = [b for b in blocks if rank in plan.workers[b.name]]

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def device(self) -> torch.device:
        """Of all that travels: a backend may carry nothing else."""
        return next(iter(self.blocks.values())).device

    def total(self, numbers: Sequence[float] | Tensor) -> Tensor:
        """Sums over all ranks, in float64: for what they must agree on."""
        mine = torch.as_tensor(numbers, dtype=torch.float64)
        if self.alone:
            return mine
        return self.comm.total(mine.to(self.device), "agreement").wait()


def world_of(
    model: nn.Module, comm: Communicator, updates: Clocks, refreshes: Clocks, inverse: Inverse
) -> World:
    """What a plan depends on besides the blocks."""
    return World(
        comm.size,
        gradients_are_local=comm.size > 1 and gradients_are_local(model),
        update_every=updates.usual(),
        refresh_every=refreshes.usual(),
        joint=inverse.joint,
        sharded=any(is_sharded(p) for p in model.parameters() if p.requires_grad),
    )


class Shipment:
    """What some ops of the plan send, as one exchange."""

    def __init__(self, team: Team, ops: Iterable[Op]) -> None:
        self.team = team
        mine = [m for m in team.plan.messages(ops) if team.rank in (m.source, m.to)]
        self.outgoing = sorted((m for m in mine if m.source == team.rank), key=lambda m: m.to)
        self.incoming = sorted((m for m in mine if m.to == team.rank), key=lambda m: m.source)
        self.sizes = _sizes(self.outgoing, lambda m: m.to, team.size)
        self.receive = _sizes(self.incoming, lambda m: m.source, team.size)

    def send(
        self, payload: Callable[[Message], Tensor], dtype: torch.dtype, purpose: str
    ) -> Pending:
        """``payload(message) [numel]`` of everything that leaves from here."""
        buffer = torch.empty(sum(self.sizes), dtype=dtype, device=self.team.device)
        parts = buffer.split([m.numel for m in self.outgoing])
        for message, part in zip(self.outgoing, parts, strict=True):
            part.copy_(payload(message))
        return self.team.comm.exchange(buffer, self.sizes, self.receive, purpose)

    def arrived(self, pending: Pending) -> Iterator[tuple[Message, Tensor]]:
        """Everything that came, from rank 0 on."""
        parts = pending.wait().split([m.numel for m in self.incoming])
        yield from zip(self.incoming, parts, strict=True)


def _sizes(messages: list[Message], key: Callable[[Message], int], count: int) -> list[int]:
    sizes = [0] * count
    for rank, group in groupby(messages, key):
        sizes[rank] = sum(m.numel for m in group)
    return sizes


def _promoted(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    first, *others = dtypes
    for dtype in others:
        first = torch.promote_types(first, dtype)
    return first


def _boxes(block: Block) -> list[Box]:
    """What of each parameter is here, and belongs to the block."""
    layer = block.layers[0]
    return [_common(box_of(p), layer.region(p)) for p in block.parameters]


def _common(one: Box, other: Box) -> Box:
    both = ((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return tuple((first, max(first, end)) for first, end in both)


def _spec(block: Block, boxes: list[list[Box]], wire: Wire) -> BlockSpec:
    """``boxes[rank][parameter]``."""
    pieces = []
    for index in range(len(block.parameters)):
        holders: dict[Box, list[int]] = {}
        for rank, own in enumerate(boxes):
            holders.setdefault(own[index], []).append(rank)
        pieces += [
            piece
            for box, ranks in sorted(holders.items())
            if (piece := Piece(index, box, tuple(ranks))).numel
        ]
    _check_cover(block, pieces)
    structure = block.structure
    return BlockSpec(
        block.name,
        block.kind,
        block.shape,
        tuple((name, _factor(block, name, wire)) for name in block.factors),
        tuple(name for name in structure.needs if name not in structure.in_basis),
        tuple(pieces),
        # Where each factor has a damping of its own, A's depends on G.
        together=len(block.layers) > 1 or not block.inverse.joint,
        in_basis=structure.in_basis,
    )


def _check_cover(block: Block, pieces: list[Piece]) -> None:
    """Raise if not every number of the gradient is held by one piece, exactly."""
    held = sum(piece.numel for piece in pieces)
    apart = True
    for index, parameter in enumerate(block.parameters):
        own = [piece.box for piece in pieces if piece.parameter == index]
        for axis in range(parameter.ndim):
            ends = sorted({box[axis] for box in own})
            apart &= all(one[1] <= other[0] for one, other in pairwise(ends))
    if held != prod(block.shape) or not apart:
        raise SettingError(
            f"{block.kind} {block.name!r} is cut in a way that its parameters do not tell: of its "
            f"{prod(block.shape)} numbers the ranks hold {held}{'' if apart else ', some twice'}. "
            "Cut it with parallelize_module and fully_shard alone, or leave it out with "
            "exclude=[...]."
        )


def _factor(block: Block, name: str, wire: Wire) -> FactorSpec:
    form = block.forms[name]
    spec = form.spec
    return FactorSpec(
        spec.dim,
        spec.batch,
        spec.numel,
        spec.diagonal,
        parts=sum(prod(shape) for shape in block.part_shapes(name)),
        sent=form.sent if wire.packed else spec.numel,
    )
