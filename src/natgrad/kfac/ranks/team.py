"""The ranks that train together, and what the plan gives to this one.

    keeps         factors whose running average is here
    decomposes    factors that this rank decomposes
    applies       blocks that this rank preconditions

A factor's running average lives only on the ranks that decompose it, and is folded there. What all
ranks must know (counts, which gradients exist, which decompositions failed, whose statistics are
not finite) is a small all-reduce at each clock, ``Team.total``; all of them then do the same. With
replicated gradients and `CommOpt` a step that updates nothing sends nothing at all.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import isfinite

import torch
from torch import Tensor, nn

from natgrad.capture.blocks import Block
from natgrad.comm.agreement import AllRanksAgree
from natgrad.comm.base import Communicator
from natgrad.comm.layouts import gradients_are_local, is_sharded
from natgrad.comm.transfers import CommunicationError
from natgrad.comm.wire import Plain, wire_of
from natgrad.errors import SettingError
from natgrad.kfac.clocks import Clocks
from natgrad.kfac.motion import Motion
from natgrad.kfac.ranks.block_specs import boxes_of, spec_of
from natgrad.kfac.ranks.distributed import Distributed
from natgrad.layers.base import real
from natgrad.linalg.threads import at_once
from natgrad.placement import Auto, Plan, World
from natgrad.placement.routes import Groups
from natgrad.specs import Box, Ranks, as_ranks


class Team:
    """``keeps``, ``decomposes``: names of factors by block; ``applies``: blocks, all of this rank.

    All ranks make it together, and find out there if they were given different things.
    """

    def __init__(
        self,
        comm: Communicator,
        blocks: list[Block],
        world: World,
        distributed: Distributed,
        motion: Motion,
    ) -> None:
        self.motion, self.distributed = motion, distributed
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        # Parts of the ranks by what they were made for: all ranks make the same ones.
        self.parts: dict[tuple[Groups, ...], Communicator] = {}
        # Of the model as it is on this rank now; 0 if that is what all ranks agreed on.
        self.digest = 0.0
        self.agreed = False  # all ranks have changed their models alike
        self.packed, self.bucket_bytes = distributed.packed, distributed.bucket_bytes
        self.dtype = _promoted(block.wide_dtype for block in blocks)  # of decompositions
        self.sum_dtype = _promoted(real(p.dtype) for b in blocks for p in b.parameters)
        self.factor_wire = wire_of(distributed.wire_dtype or self.sum_dtype)
        self.units = self.factor_wire.dtype == torch.float16  # too narrow for numbers as they are
        self.inverse_wire = wire_of(distributed.inverse_dtype or self.dtype)
        self.gradient_dtype = _promoted(p.dtype for b in blocks for p in b.parameters)
        self.gradient_wire = wire_of(distributed.gradient_dtype or self.gradient_dtype)
        boxes = _boxes_of_all(comm, [boxes_of(block) for block in blocks])
        specs = [
            spec_of(block, boxes[index], comm.size, motion, packed=self.packed)
            for index, block in enumerate(blocks)
        ]
        world = replace(
            world,
            factor_bytes=self.factor_wire.dtype.itemsize,
            inverse_bytes=self.inverse_wire.dtype.itemsize,
            gradient_bytes=self.gradient_wire.dtype.itemsize,
            factors_per_word=self.factor_wire.per_word,
            inverses_per_word=self.inverse_wire.per_word,
            gradients_per_word=self.gradient_wire.per_word,
            kept_factor_bytes=blocks[0].dtype.itemsize,
            kept_inverse_bytes=self.dtype.itemsize,
            bucket_bytes=self.bucket_bytes,
            units=self.units,
            sum_bytes=self.factor_wire.summed_as.itemsize,
            gradient_sum_bytes=self.gradient_wire.summed_as.itemsize,
            total_bytes=Plain(self.gradient_dtype).summed_as.itemsize,
            route=distributed.route,
            kept_sum_bytes=self.sum_dtype.itemsize,
            at_once=at_once() if blocks[0].device.type == "cpu" else 1,
        )
        placement = distributed.placement or Auto()
        with AllRanksAgree(comm) as agreed:
            self.plan: Plan = placement(specs, world)
            agreed.compared = {
                "who adds up gradients": "K-FAC" if world.gradients_are_local else "DDP or FSDP",
                "placement": self.plan.strategy,
                "packed": repr(self.packed),
                "bucket_bytes": repr(self.bucket_bytes),
                "route": repr(distributed.route),
                "inverse_dtype": repr(self.inverse_wire),
                "gradient_dtype": repr(self.gradient_wire),
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

    def successor(self, blocks: list[Block]) -> "Team":
        """The same ranks with other blocks, and a plan for these. All ranks make it together."""
        team = Team(self.comm, blocks, self.plan.world, self.distributed, self.motion)
        team.parts = self.parts
        return team

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

    def settle(self, digests: float, squares: float) -> None:
        """The digests of all ranks' models, added up: not 0, so that some have changed. All ranks
        raise if not all have, or in different ways: they would wait for each other."""
        # As integers: of a thousand ranks the products have more digits than a float.
        if self.counted(squares) * self.size != self.counted(digests) ** 2:
            here = "has changed" if self.digest else "is as it was"
            raise SettingError(
                f"The model was changed between two steps, but not on all ranks alike (on rank "
                f"{self.rank} it {here}): freeze, unfreeze, add and replace the same layers on "
                "every rank, before the same step."
            )
        self.agreed, self.digest = True, 0.0

    def part(self, family: Sequence[Groups]) -> Communicator:
        """This rank's group of some that do not overlap, or this rank alone. Made by all ranks
        together, once, also for teams that follow this one."""
        key = tuple(family)
        if key not in self.parts:
            groups = (found for groups in family if (found := groups.of(self.rank)) is not None)
            self.parts[key] = self.comm.split(next(groups, (self.rank,)))
        return self.parts[key]

    def counted(self, number: float) -> int:
        """What all ranks have counted, added up; what is no number was changed on its way."""
        if not isfinite(number):
            raise CommunicationError(
                f"What the ranks have counted adds up to {number}, so that a message was changed "
                "on its way: look at the network, and go on from the last checkpoint."
            )
        return int(number)


def _boxes_of_all(
    comm: Communicator, own: list[list[tuple[Box, ...]]]
) -> list[list[dict[Box, Ranks]]]:
    """The ranks that hold each box, of every block and parameter.

    Where all ranks hold the same, as without shards, they find that out by one number each: whole
    lists from thousands of ranks would take longer than the training of a step."""
    digest = hashlib.sha256(repr(own).encode()).hexdigest()
    if len(set(comm.gather(digest))) == 1:
        everywhere = range(comm.size)
        return [[dict.fromkeys(boxes, everywhere) for boxes in block] for block in own]
    everyone = comm.gather(own)
    found: list[list[dict[Box, list[int]]]] = [[{} for _ in block] for block in own]
    for rank, theirs in enumerate(everyone):
        for index, block in enumerate(theirs):
            for parameter, boxes in enumerate(block):
                for box in boxes:
                    found[index][parameter].setdefault(box, []).append(rank)
    return [[{b: as_ranks(r) for b, r in held.items()} for held in block] for block in found]


def world_of(model: nn.Module, comm: Communicator, updates: Clocks, refreshes: Clocks) -> World:
    """What a plan depends on besides the blocks."""
    return World(
        comm.size,
        gradients_are_local=comm.size > 1 and gradients_are_local(model),
        update_every=updates.typical(),
        refresh_every=refreshes.typical(),
        sharded=any(is_sharded(p) for p in model.parameters() if p.requires_grad),
    )


def _promoted(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    first, *others = dtypes
    for dtype in others:
        first = torch.promote_types(first, dtype)
    return first
