"""Gradients on their way to the ranks that precondition them, and back, however they lie."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from natgrad.comm.layouts import box_of, is_sharded, local, settled_gradient
from natgrad.errors import CaptureError
from natgrad.placement.ops import (
    ApplyOp,
    Gather,
    Message,
    Op,
    ReduceGradient,
    Return,
    TotalGradients,
)
from natgrad.runtime.blocks import Block
from natgrad.runtime.team import Shipment, Team
from natgrad.specs import Piece


class Gradients:
    """What a step reads gradients from and writes them to; alone, that is ``.grad`` itself.

    ``parameters`` are all of the model's; those of no block only matter where nobody else adds
    their gradients up.
    """

    def __init__(self, team: Team, parameters: Iterable[nn.Parameter]) -> None:
        self.team, self.parameters = team, [p for p in parameters if p.requires_grad]
        self.are_local = team.plan.world.gradients_are_local and not team.alone
        self.travel = team.plan.travels
        self.sharded = [p for p in self.parameters if is_sharded(p)]
        self._full: dict[int, Tensor] = {}
        self._shipments: dict[tuple[Op, ...], list[Shipment]] = {}
        self._cut = {id(p) for p in self.sharded if local(p).shape != p.shape}
        self._firsts = {id(p): [first for first, _ in box_of(p)] for p in self.parameters}

    def read(self, p: nn.Parameter) -> Tensor:
        """The gradient of a parameter that is preconditioned here, whole."""
        found = self._full.get(id(p))
        if found is None:
            assert p.grad is not None
            found = local(p.grad)
        return found

    def agree(self, samples: int | None, ready: Sequence[Block]) -> tuple[list[Block], int]:
        """The blocks that every rank has gradients of, and the samples of all ranks.

        A block that only some ranks have is an error on all of them: they would wait for it."""
        for p in self.sharded:
            settled_gradient(p)
        present = [block for block in ready if block.has_gradient]
        if not self.travel:
            return present, samples or 0
        flags = [float(block in present) for block in ready]
        n, *counts = self.team.total([float(samples or 0), *flags]).tolist()
        for block, count in zip(ready, counts, strict=True):
            if 0 < count < self.team.size:
                raise missing_somewhere(block, int(count), self.team)
        return [b for b, count in zip(ready, counts, strict=True) if count], int(n)

    def collect(self, blocks: Sequence[Block], weight: float) -> None:
        """Bring the gradients of ``blocks`` to the ranks that precondition them, added up with
        ``weight`` times this rank's where nobody else did that."""
        self._full = {}
        if not self.travel:
            return
        names = {block.name for block in blocks}
        ops = [op for op in self.team.plan.apply if _about(op, names)]
        if self.are_local:
            by_owner = [op for op in ops if isinstance(op, ReduceGradient)]
            elsewhere = {id(p) for op in by_owner for p in self.team.blocks[op.block].parameters}
            self._add_up([p for p in self.parameters if id(p) not in elsewhere], weight)
            self._reduce(by_owner, weight)
        gathers = [op for op in ops if isinstance(op, Gather)]
        mine = [block for block in blocks if block in self.team.applies]
        for block in mine:
            self._assemble(block)

        def payload(message: Message) -> Tensor:
            assert isinstance(message.op, Gather)
            p, piece = self._piece(message.op.block, message.op.piece)
            return self._here(p, piece).flatten()

        for message, data in self._carry(gathers, payload):
            assert isinstance(message.op, Gather)
            p, piece = self._piece(message.op.block, message.op.piece)
            view = self._full[id(p)][_slices(piece, [0] * len(piece.box))]
            view.copy_(data.view(view.shape))

    def give_back(self, blocks: Sequence[Block], dots: Tensor) -> None:
        """Bring preconditioned gradients to all ranks that hold them, and with each block its share
        of the KL clip, an entry of ``dots``."""
        if not self.travel:
            return
        names = {block.name for block in blocks}
        order = {block.name: index for block, index in self.team.order.items()}
        returns = [
            op for op in self.team.plan.apply if isinstance(op, Return) and op.block in names
        ]

        def payload(message: Message) -> Tensor:
            op = message.op
            assert isinstance(op, Return)
            parts = []
            if op.piece is not None:
                p, piece = self._piece(op.block, op.piece)
                firsts = [0] * len(piece.box)
                parts.append(self.read(p)[_slices(piece, firsts)].flatten())
            if message.clip:
                parts.append(dots[order[op.block]].view(1).to(self.team.gradient_dtype))
            return torch.cat(parts)

        for message, data in self._carry(returns, payload):
            op = message.op
            assert isinstance(op, Return)
            if message.clip:
                dots[order[op.block]] = data[-1]
                data = data[:-1]
            if op.piece is not None:
                p, piece = self._piece(op.block, op.piece)
                view = self._here(p, piece)
                view.copy_(data.view(view.shape))
        for block in blocks:
            if block in self.team.applies:
                # As others got it, so that all ranks clip by the same number.
                index = self.team.order[block]
                dots[index] = dots[index].to(self.team.gradient_dtype)
                self._keep_own(block)
        self._full = {}

    def finite(self, gradients: Sequence[Tensor], present: Sequence[Block]) -> Tensor:
        """Whether gradients that stay with each rank are numbers, on every rank. What is wrong with
        those of blocks ``present`` shows in their products, which all ranks know."""
        norms = torch._foreach_norm(list(gradients)) if gradients else ()
        good = torch.ones((), dtype=torch.bool, device=self.team.device)
        for norm in norms:
            good = good & torch.isfinite(norm).to(good.device)
        owned = {id(p) for block in present for p in block.parameters}
        spread = any(id(p) not in owned for p in self.sharded)
        if not self.team.alone and (spread or (self.sharded and not self.travel)):
            good = good & (self.team.total([float(not good)])[0] == 0).to(good.device)
        return good

    # Local gradients.

    def _add_up(self, parameters: Sequence[nn.Parameter], weight: float) -> None:
        """Every rank's sum of local gradients, in one buffer; zeros stand for missing ones."""
        if not parameters:
            return
        dtype = self.team.gradient_dtype
        parts = [
            torch.zeros_like(p, dtype=dtype).flatten()
            if p.grad is None
            else (p.grad * weight).to(dtype).flatten()
            for p in parameters
        ]
        summed = self.team.comm.total(torch.cat(parts), "gradients").wait()
        for p, part in zip(parameters, summed.split([p.numel() for p in parameters]), strict=True):
            if p.grad is not None:
                p.grad.copy_(part.view_as(p))
            elif bool(part.any()):  # other ranks used it: their update must happen here, too
                p.grad = part.view_as(p).to(p.dtype)

    def _reduce(self, ops: Sequence[ReduceGradient], weight: float) -> None:
        """Sums of local gradients at the ranks that precondition them, in the order of ranks."""
        shares = {op.block: self._flat(self.team.blocks[op.block], weight) for op in ops}

        def payload(message: Message) -> Tensor:
            assert isinstance(message.op, ReduceGradient)
            return shares[message.op.block]

        found: dict[str, dict[int, Tensor]] = {
            op.block: {self.team.rank: shares[op.block]} for op in ops if self.team.rank in op.to
        }
        for message, data in self._carry(ops, payload):
            assert isinstance(message.op, ReduceGradient)
            found[message.op.block][message.source] = data
        for name, by_rank in found.items():
            total = torch.zeros_like(by_rank[self.team.rank])
            for rank in sorted(by_rank):
                total += by_rank[rank]
            pieces = self.team.plan.block[name].pieces
            for part, index in zip(
                total.split([piece.numel for piece in pieces]), range(len(pieces)), strict=True
            ):
                p, piece = self._piece(name, index)
                view = self._here(p, piece)
                view.copy_(part.view(view.shape))

    def _flat(self, block: Block, weight: float) -> Tensor:
        pieces = range(len(self.team.plan.block[block.name].pieces))
        parts = [self._here(*self._piece(block.name, index)).flatten() for index in pieces]
        return (torch.cat(parts) * weight).to(self.team.gradient_dtype)

    # Pieces.

    def _piece(self, block: str, index: int | None) -> tuple[nn.Parameter, Piece]:
        assert index is not None
        piece = self.team.plan.block[block].pieces[index]
        return self.team.blocks[block].parameters[piece.parameter], piece

    def _here(self, p: nn.Parameter, piece: Piece) -> Tensor:
        """A piece that this rank holds, as a view of its gradient."""
        assert p.grad is not None
        return local(p.grad)[_slices(piece, self._firsts[id(p)])]

    def _assemble(self, block: Block) -> None:
        """Room for whole gradients of parameters that are cut, with what is here in it."""
        for index, piece in enumerate(self.team.plan.block[block.name].pieces):
            p, _ = self._piece(block.name, index)
            if id(p) not in self._cut:
                continue
            if id(p) not in self._full:
                assert p.grad is not None
                self._full[id(p)] = local(p.grad).new_zeros(p.shape)
            if self.team.rank in piece.holders:
                view = self._full[id(p)][_slices(piece, [0] * len(piece.box))]
                view.copy_(self._here(p, piece))

    def _keep_own(self, block: Block) -> None:
        for index, piece in enumerate(self.team.plan.block[block.name].pieces):
            p, _ = self._piece(block.name, index)
            if id(p) in self._full and self.team.rank in piece.holders:
                here = self._here(p, piece)
                here.copy_(self._full[id(p)][_slices(piece, [0] * len(piece.box))])

    def _carry(
        self, ops: Sequence[ApplyOp], payload: Callable[[Message], Tensor]
    ) -> Iterable[tuple[Message, Tensor]]:
        """One exchange for each bucket of ``ops``."""
        key = tuple(ops)
        if key not in self._shipments:
            self._shipments[key] = [Shipment(self.team, some) for some in self.team.plan.cut(ops)]
        for shipment in self._shipments[key]:
            pending = shipment.send(payload, self.team.gradient_dtype, "gradients")
            yield from shipment.arrived(pending)


def missing_somewhere(block: Block, count: int, team: Team) -> CaptureError:
    """``count``: how many ranks have the gradient."""
    here = "has one" if block.has_gradient else "has none"
    return CaptureError(
        f"{block.kind} {block.name!r} has a gradient on {count} of {team.size} ranks only (rank "
        f"{team.rank} {here}): use every layer on every rank, or leave it out on all of them."
    )


def _about(op: ApplyOp, names: set[str]) -> bool:
    return not isinstance(op, TotalGradients) and op.block in names


def _slices(piece: Piece, firsts: Sequence[int]) -> tuple[slice, ...]:
    return tuple(
        slice(start - first, stop - first)
        for (start, stop), first in zip(piece.box, firsts, strict=True)
    )
