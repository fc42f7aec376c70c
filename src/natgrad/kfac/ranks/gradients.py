"""Gradients on their way to the ranks that precondition them, and back, however they are laid out.

    collect     Gather: pieces of sharded gradients -> full ones at the workers of a block
                ReduceGradient, or an all-reduce: local gradients of all ranks, summed
    give_back   Return: preconditioned pieces -> all ranks that hold them

Gradients of a plain model are averaged here, each rank's weighted by its number of samples, so that
every sample counts once however unevenly they lie. DDP and FSDP have averaged theirs already.

With the pieces of a block travels one more number, its share of the KL clip: the clip needs no
collective of its own. Before anything is sent all ranks agree on the blocks that have gradients, as
a rank that has none would leave the others waiting.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from natgrad.capture.blocks import Block
from natgrad.comm.layouts import box_of, is_sharded, local, reduced_gradient
from natgrad.comm.transfers import CommunicationError
from natgrad.comm.wire import Plain
from natgrad.errors import CaptureError
from natgrad.kfac.ranks.block_specs import view_of
from natgrad.kfac.ranks.copying import Copying
from natgrad.kfac.ranks.summing import InFlight, Summing, SumOp
from natgrad.kfac.ranks.team import Team
from natgrad.placement.ops import ApplyOp, Gather, Op, ReduceGradient, Return, TotalGradients
from natgrad.specs import Box, Piece


class Gradients:
    """Where a step reads and writes gradients; in one process that is ``.grad`` itself.

    ``parameters`` are all of the model's: gradients without a block are averaged here, too, where
    neither DDP nor FSDP does.
    """

    def __init__(self, team: Team, parameters: Iterable[nn.Parameter]) -> None:
        self.team = team
        self.are_local = team.plan.world.gradients_are_local and not team.alone
        self.travel = team.plan.travels
        self._full: dict[int, Tensor] = {}
        self._ready: Sequence[Block] = ()
        self._present: list[Block] | None = None
        wire, plan = team.gradient_wire, team.plan
        self._rounds = wire != Plain(team.gradient_dtype)
        self._summing = Summing(team, plan.routes.sums, wire, wire.summed_as, "gradients")
        copies = [op for op in plan.apply if isinstance(op, Gather | Return)]
        self._copying = Copying(team, copies, wire, "gradients")
        self.follow(parameters)

    def follow(self, parameters: Iterable[nn.Parameter]) -> None:
        """These are the model's from now on; those that are trained have gradients."""
        self.parameters = [p for p in parameters if p.requires_grad]
        self.sharded = [p for p in self.parameters if is_sharded(p)]
        blocks = self.team.blocks.values()
        self._lost = {id(p) for block in blocks if block.lost for p in block.parameters}
        self._plain = not self.travel and not self.sharded and not self._lost
        self._sharded_ids = {id(p) for p in self.sharded if local(p).shape != p.shape}
        self._offsets = {id(p): [first for first, _ in box_of(p)] for p in self.parameters}

    def take_over(self, other: "Gradients") -> None:
        """Go on from one with other blocks: what was preconditioned in the last step, until the
        next."""
        self._present = other.present

    def read(self, p: nn.Parameter) -> Tensor:
        """The full gradient of a parameter that is preconditioned here."""
        found = self._full.get(id(p))
        if found is None:
            assert p.grad is not None
            found = local(p.grad)
        return found

    def of(self, parameters: Sequence[nn.Parameter]) -> list[Tensor | None]:
        """The full gradients of parameters that are preconditioned here."""
        if self._plain:
            return [p.grad for p in parameters]
        return [None if p.grad is None or id(p) in self._lost else self.read(p) for p in parameters]

    def here(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """This rank's local part of the gradients of these parameters, of those that have one."""
        found = []
        for p in parameters:
            if (gradient := p.grad) is not None:
                if gradient.is_sparse:
                    gradient = gradient._values()  # all other entries are 0
                found.append(gradient if self._plain else local(gradient))
        return found

    def any_here(self) -> bool:
        return any(p.grad is not None for p in self.parameters)

    @property
    def present(self) -> list[Block]:
        """The blocks that are ready and have gradients, on all ranks."""
        if self._present is None:
            self._present = [block for block in self._ready if block.has_gradient]
        return self._present

    @property
    def complete(self) -> bool:
        """Whether all blocks that are ready have gradients; True where nothing travels."""
        return not self.travel or len(self.present) == len(self._ready)

    def agree(self, samples: int | None, ready: Sequence[Block]) -> int:
        """Find out which blocks every rank has gradients of; returns the samples of all ranks.

        A block that only some ranks have is an error on all of them: they would wait for it."""
        for p in self.sharded:
            reduced_gradient(p)
        self._ready, self._present = ready, None
        if not self.travel:
            return samples or 0
        flags = [float(block.has_gradient) for block in ready]
        mine, digest = float(samples or 0), self.team.digest
        n, digests, squares, *counts = self.team.total([mine, digest, digest**2, *flags]).tolist()
        if digests:
            self.team.settle(digests, squares)
        for block, count in zip(ready, counts, strict=True):
            if 0 < count < self.team.size:
                raise missing_somewhere(block, int(count), self.team)
        self._present = [b for b, count in zip(ready, counts, strict=True) if count]
        return self.team.counted(n)

    def collect(self, weight: float) -> None:
        """Bring the gradients of blocks that are ``present`` to the ranks that precondition them,
        added up with ``weight`` times this rank's where nobody else did that."""
        self._full = {}
        if not self.travel:
            return
        blocks = self.present
        names = {block.name for block in blocks}
        ops = [op for op in self.team.plan.apply if _is_of(op, names)]
        if self.are_local:
            by_owner = [op for op in ops if isinstance(op, ReduceGradient)]
            elsewhere = {id(p) for op in by_owner for p in self.team.blocks[op.block].parameters}
            self._all_reduce([p for p in self.parameters if id(p) not in elsewhere], weight)
            self._reduce_to_owners(by_owner, weight)
        gathers = [op for op in ops if isinstance(op, Gather)]
        mine = [block for block in blocks if block in self.team.applies]
        for block in mine:
            self._assemble(block)

        def part(op: Op, to: int, clip: bool) -> Tensor:
            assert isinstance(op, Gather)
            return self._local_piece(op.block, op.piece).flatten()

        for arrival in self._copying(gathers, part):
            op = arrival.op
            assert isinstance(op, Gather)
            p, piece = self._piece(op.block, op.piece)
            view = self._at(op.block, p, self._full[id(p)], piece.part(arrival.source))
            view.copy_(arrival.data.view(view.shape))
            del arrival  # with its buffer, before the next one is made

    def give_back(self, dots: Tensor) -> None:
        """Bring preconditioned gradients to all ranks that hold them, and with each block its share
        of the KL clip, an entry of ``dots``."""
        if not self.travel:
            return
        blocks = self.present
        names = {block.name for block in blocks}
        order = {block.name: index for block, index in self.team.order.items()}
        returns = [
            op for op in self.team.plan.apply if isinstance(op, Return) and op.block in names
        ]
        sent = {op.block for op in returns}

        def result(op: Op, to: int, clip: bool) -> Tensor:
            assert isinstance(op, Return)
            parts = []
            if op.piece is not None:
                p, piece = self._piece(op.block, op.piece)
                parts.append(self._at(op.block, p, self.read(p), piece.part(to)).flatten())
            if clip:
                parts.append(dots[order[op.block]].view(1).to(self.team.gradient_wire.held_as))
            return torch.cat(parts)

        come = torch.zeros_like(dots)  # 0, or not a number
        for arrival in self._copying(returns, result):
            op, data = arrival.op, arrival.data
            assert isinstance(op, Return)
            if arrival.clip:
                dots[order[op.block]] = data[-1]
                data = data[:-1]
            if op.piece is not None:
                come[order[op.block]] += 0 * data.sum()
                view = self._local_piece(op.block, op.piece)
                view.copy_(data.view(view.shape))
            del arrival, data  # with their buffer, before the next one is made
        self._check_arrived(come, dots)
        for block in blocks:
            if block in self.team.applies:
                # As others got it, so that all ranks clip by the same number.
                index = self.team.order[block]
                dots[index] = self.team.gradient_wire.rounded(dots[index])
                if block.name in sent and self._rounds:
                    self._round(block)
                self._write_own_pieces(block)
        self._full = {}

    def _check_arrived(self, come: Tensor, dots: Tensor) -> None:
        """What is not finite where it was made shows in its inner product, and all ranks drop the
        step. If it only is where it has come to, this rank would drop it alone."""
        if come.is_cpu and not bool((come.isfinite() | ~dots.isfinite()).all()):
            raise CommunicationError(
                "Preconditioned gradients that have come from another rank are not finite, though "
                "they were there, so that a message was changed on its way: look at the network, "
                "and go on from the last checkpoint."
            )
        dots += come  # an accelerator is not waited for

    def finite(self, gradients: Sequence[Tensor]) -> Tensor:
        """Whether gradients that are not preconditioned are finite, on every rank. For the blocks
        ``present`` their inner products show it, which all ranks know."""
        norms = torch._foreach_norm(list(gradients)) if gradients else ()
        good = torch.ones((), dtype=torch.bool, device=self.team.device)
        for norm in norms:
            good = good & torch.isfinite(norm).to(good.device)
        if self.sharded and not self.team.alone:
            owned = {id(p) for block in self.present for p in block.parameters}
            if not self.travel or any(id(p) not in owned for p in self.sharded):
                good = good & (self.team.total([float(not good)])[0] == 0).to(good.device)
        return good

    # Local gradients.

    def _all_reduce(self, parameters: Sequence[nn.Parameter], weight: float) -> None:
        """All-reduce of local gradients, in one buffer; a missing one is sent as zeros, and so is
        what is not in a sparse one."""
        if not parameters:
            return
        summed = self.team.comm.total(self._weighted(parameters, weight), "gradients").wait()
        for p, part in zip(parameters, summed.split([p.numel() for p in parameters]), strict=True):
            if p.grad is not None and p.grad.is_sparse:  # rows that any rank has looked up
                p.grad = part.view_as(p).to(p.dtype).to_sparse(1)
            elif p.grad is not None:
                p.grad.copy_(part.view_as(p))
            elif bool(part.any()):  # other ranks used it: their update must happen here, too
                p.grad = part.view_as(p).to(p.dtype)

    def _weighted(self, parameters: Sequence[nn.Parameter], weight: float) -> Tensor:
        sizes = [p.numel() for p in parameters]
        found = torch.zeros(sum(sizes), dtype=self.team.gradient_dtype, device=self.team.device)
        for p, part in zip(parameters, found.split(sizes), strict=True):
            if p.grad is not None:
                part.copy_((p.grad.to_dense() * weight).flatten())
        return found

    def _reduce_to_owners(self, ops: Sequence[ReduceGradient], weight: float) -> None:
        """Sums of local gradients at the ranks that precondition them, in the order of ranks."""

        def share(op: SumOp) -> Tensor:
            assert isinstance(op, ReduceGradient)
            return self._flat(self.team.blocks[op.block], weight)

        buckets: list[InFlight] = []
        for some in self.team.plan.cut(ops):
            self._summing.make_room(some, buckets)
            buckets.append(self._summing.start(some, share))
        for op, total in self._summing.finish(buckets):
            assert isinstance(op, ReduceGradient)
            name = op.block
            pieces = self.team.plan.block[name].pieces
            for part, index in zip(
                total.split([piece.numel for piece in pieces]), range(len(pieces)), strict=True
            ):
                view = self._local_piece(name, index)
                view.copy_(part.view(view.shape))

    def _flat(self, block: Block, weight: float) -> Tensor:
        pieces = range(len(self.team.plan.block[block.name].pieces))
        parts = [self._local_piece(block.name, index).flatten() for index in pieces]
        return torch.cat(parts).mul_(weight)

    # Pieces.

    def _piece(self, block: str, index: int | None) -> tuple[nn.Parameter, Piece]:
        assert index is not None
        piece = self.team.plan.block[block].pieces[index]
        return self.team.blocks[block].parameters[piece.parameter], piece

    def _at(
        self, block: str, p: nn.Parameter, t: Tensor, box: Box, offsets: Sequence[int] = ()
    ) -> Tensor:
        """A box of a tensor like ``p``, as a view; ``offsets``: where the tensor begins in it."""
        return view_of(t, box, offsets, self.team.blocks[block].layers[0].unfolding(p))

    def _local_piece(self, block: str, index: int | None) -> Tensor:
        """What this rank holds of a piece, as a view of its gradient."""
        p, piece = self._piece(block, index)
        assert p.grad is not None
        box = piece.part(self.team.rank)
        return self._at(block, p, local(p.grad), box, self._offsets[id(p)])

    def _assemble(self, block: Block) -> None:
        """Full gradients of sharded parameters, filled with the pieces that this rank holds."""
        for index, piece in enumerate(self.team.plan.block[block.name].pieces):
            p, _ = self._piece(block.name, index)
            if id(p) not in self._sharded_ids:
                continue
            if id(p) not in self._full:
                assert p.grad is not None
                self._full[id(p)] = local(p.grad).new_zeros(p.shape)
            if self.team.rank in piece.holders:
                view = self._at(block.name, p, self._full[id(p)], piece.part(self.team.rank))
                view.copy_(self._local_piece(block.name, index))

    def _round(self, block: Block) -> None:
        """What was preconditioned here becomes what other ranks get of it."""
        for index, piece in enumerate(self.team.plan.block[block.name].pieces):
            p, _ = self._piece(block.name, index)
            view = self._at(block.name, p, self.read(p), piece.box)
            view.copy_(self.team.gradient_wire.rounded(view))

    def _write_own_pieces(self, block: Block) -> None:
        for index, piece in enumerate(self.team.plan.block[block.name].pieces):
            p, _ = self._piece(block.name, index)
            if id(p) in self._full and self.team.rank in piece.holders:
                box = piece.part(self.team.rank)
                here = self._local_piece(block.name, index)
                here.copy_(self._at(block.name, p, self._full[id(p)], box))


def missing_somewhere(block: Block, count: int, team: Team) -> CaptureError:
    """``count``: how many ranks have the gradient."""
    here = "has one" if block.has_gradient else "has none"
    return CaptureError(
        f"{block.kind} {block.name!r} has a gradient on {count} of {team.size} ranks only (rank "
        f"{team.rank} {here}): use every layer on every rank, or leave it out on all of them."
    )


def _is_of(op: ApplyOp, names: set[str]) -> bool:
    return not isinstance(op, TotalGradients) and op.block in names
