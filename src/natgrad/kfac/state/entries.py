"""The tensors of a state, one by one: which ranks have each under a plan, and its shape.

The list follows from the model and the settings alone and has the same order everywhere. Resharding
is then no special case: it is the same list with other ranks in it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from natgrad.capture.blocks import Block
from natgrad.inverses import Parts
from natgrad.kfac.ranks.team import Team
from natgrad.specs import Ranks

Kind = Literal["factors", "parts", "moments"]


@dataclass(frozen=True)
class Entry:
    """``part``: "mean", "weight" or "change" of a running average, the index of a part of a
    decomposition, or "" for a moment, whose name stands where others have that of their factor.
    ``ranks`` have it, all with the same numbers."""

    block: Block
    factor: str
    kind: Kind
    part: str | int
    shape: tuple[int, ...]
    dtype: torch.dtype
    ranks: Ranks

    @property
    def key(self) -> str:
        return f"{self.kind}:{self.factor}:{self.part}:{self.block.name}"

    @property
    def here(self) -> Tensor | None:
        """What this rank has of it now."""
        if self.kind == "moments":
            return self.block.moments.get(self.factor)
        if isinstance(self.part, int):
            parts = self.block.parts.get(self.factor)
            return None if parts is None else parts[self.part]
        running = self.block.running.get(self.factor)
        if running is None:
            return None
        found: Tensor = getattr(running, self.part)
        return found

    def copy(self, value: Tensor | None) -> Tensor:
        """``value``, or zeros, as a tensor of its own with the right dtype and device."""
        if value is None:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.block.device)
        return value.detach().to(self.block.device, self.dtype, copy=True).contiguous()


def entries(team: Team) -> Iterator[Entry]:
    """All that a state can have, in the same order at every world size."""
    for block in team.blocks.values():
        numbers = block.wide_dtype
        for name, form in block.forms.items():
            keepers = team.plan.keepers[block.name, name]
            yield Entry(block, name, "factors", "mean", (form.numel,), block.dtype, keepers)
            for part in ("weight", "change"):
                yield Entry(block, name, "factors", part, (), numbers, keepers)
            holders = team.plan.holders.get((block.name, name), ())
            if holders:
                for index, shape in enumerate(block.part_shapes(name)):
                    yield Entry(block, name, "parts", index, shape, numbers, holders)
        workers = team.plan.workers[block.name]
        for name, shape in team.motion.kept(block.shape).items():
            yield Entry(block, name, "moments", "", shape, numbers, workers)


def saved(state: Mapping[str, Any], team: Team) -> Iterator[Entry]:
    """The entries that a state says to have."""
    for entry in entries(team):
        if entry.factor in state["blocks"][entry.block.name]["saved"][entry.kind]:
            yield entry


class BlockTensors(NamedTuple):
    """Of a block: its averages by factor and field, the parts of its decomposed factors, and what
    steps keep, by name."""

    averages: dict[tuple[str, str], Tensor]
    parts: dict[str, Parts]
    moments: dict[str, Tensor]


def tensors_of_block(block: Block, tensors: Mapping[Entry, Tensor]) -> BlockTensors:
    found = BlockTensors({}, {}, {})
    for entry, tensor in tensors.items():
        if entry.block is not block:
            continue
        if entry.kind == "moments":
            found.moments[entry.factor] = tensor
        elif isinstance(entry.part, int):
            found.parts[entry.factor] = (*found.parts.get(entry.factor, ()), tensor)
        else:
            found.averages[entry.factor, entry.part] = tensor
    return found


def gathered(team: Team, wanted: Sequence[Entry]) -> Iterator[tuple[Entry, Tensor]]:
    """Copies of the tensors of all ranks, each from the first rank that has it.

    They travel as bytes, about ``bucket_bytes`` at a time whatever their sizes."""
    copies = [
        (entry, entry.copy(entry.here if team.rank == entry.ranks[0] else None)) for entry in wanted
    ]
    if not team.alone:
        by_source: list[list[Tensor]] = [[] for _ in range(team.size)]
        for entry, copy in copies:
            by_source[entry.ranks[0]].append(copy)
        _all_gather(team, [_Bytes(tensors) for tensors in by_source])
    yield from copies


def _all_gather(team: Team, streams: "list[_Bytes]") -> None:
    """An all-gather: what rank r has in ``streams[r]`` goes to ``streams[r]`` on all ranks."""
    step = max(1, team.bucket_bytes // team.size)  # it is sent to every other rank
    for first in range(0, max(stream.size for stream in streams), step):
        sizes = [min(max(0, stream.size - first), step) for stream in streams]
        own, receive = sizes[team.rank], list(sizes)
        send = [own] * team.size
        send[team.rank] = receive[team.rank] = 0
        mine = list(streams[team.rank].views(first, first + own))
        nothing = torch.empty(0, dtype=torch.uint8, device=team.device)
        buffer = torch.cat([nothing, *mine]).repeat(team.size - 1)
        arrived = team.comm.exchange(buffer, send, receive, "state").wait()
        for rank, piece in enumerate(arrived.split(receive)):
            if rank != team.rank:
                views = list(streams[rank].views(first, first + sizes[rank]))
                for view, part in zip(views, piece.split([len(v) for v in views]), strict=True):
                    view.copy_(part)


class _Bytes:
    """Contiguous tensors as one string of bytes."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.parts = [t.view(-1).view(torch.uint8) for t in tensors if t.numel()]
        self.starts = list(accumulate((len(part) for part in self.parts), initial=0))
        self.size = self.starts[-1]

    def views(self, first: int, end: int) -> Iterator[Tensor]:
        """The bytes from ``first`` to ``end``, in pieces that can be written to."""
        for start, part in zip(self.starts, self.parts, strict=False):
            low, high = max(0, first - start), min(len(part), end - start)
            if low < high:
                yield part[low:high]
