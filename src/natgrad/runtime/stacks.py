"""Blocks of one shape, preconditioned together: small products cost more to start than to do."""

from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.inverses import Parts
from natgrad.layers.base import Read
from natgrad.linalg.workspace import workspace
from natgrad.runtime.blocks import Block
from natgrad.runtime.thin import Outer

Rates = Callable[[nn.Parameter], float]


class Stack:
    """The parts of its blocks lie one behind the other in the same tensors."""

    def __init__(self, blocks: list[Block]) -> None:
        self.blocks = blocks
        first = blocks[0]
        self.structure, self.inverse = first.structure, first.inverse
        if len(blocks) == 1:
            self.parts = first.parts
        else:
            self.parts = {
                name: tuple(
                    torch.cat([block.parts[name][i] for block in blocks])
                    for i in range(len(first.parts[name]))
                )
                for name in first.parts
            }
            for index, block in enumerate(blocks):
                for name, stacked in self.parts.items():
                    block.parts[name] = tuple(
                        part.unflatten(0, (len(blocks), -1))[index] for part in stacked
                    )
        self._cache: dict[str, Any] = {}
        self._versions: list[int] = []

    @property
    def size(self) -> int:
        """Bytes of the gradients of all blocks."""
        return len(self.blocks) * prod(self.blocks[0].shape) * self._zero().element_size()

    def precondition(
        self,
        damping: float,
        rates: Rates,
        outers: dict[Block, Outer],
        present: set[Block],
        read: Read,
    ) -> dict[Block, Tensor]:
        """Replace the gradients of those ``present``, but for those in ``outers``, which are
        written later; returns ``lr^2 |<preconditioned, raw>|`` of each (P17)."""
        if self._versions != (now := [block.version for block in self.blocks]):
            self._cache, self._versions = {}, now
        dots, rest = {}, []
        for block in self.blocks:
            if block in outers:
                layer = block.layers[0]
                own = [0.0 if p is None else rates(p) for p in (layer.weight, layer.bias)]
                dots[block] = outers[block].dot(*own)
            else:
                rest.append(block)
        if len(rest) == len(self.blocks):
            return self._together(rest, self.parts, damping, rates, self._cache, present, read)
        for block in rest:
            dots |= self._together([block], block.parts, damping, rates, {}, present, read)
        return dots

    def _together(
        self,
        blocks: list[Block],
        parts: dict[str, Parts],
        damping: float,
        rates: Rates,
        cache: dict[str, Any],
        present: set[Block],
        read: Read,
    ) -> dict[Block, Tensor]:
        """Precondition the gradients of ``blocks``, whose parts are stacked in ``parts``."""
        count, shape = len(blocks), blocks[0].shape
        raw = workspace("raw", (count * prod(shape),), self._zero()).view(count, *shape)
        used = [index for index, block in enumerate(blocks) if block in present]
        for index, block in enumerate(blocks):
            if index in used:
                block.layers[0].load(raw[index], read)
            else:
                raw[index].zero_()
        if not used:
            return {}
        out = self.structure.precondition(parts, self.inverse, raw.flatten(0, 1), damping, cache)
        out = out.view_as(raw)
        for index in used:
            blocks[index].layers[0].store(out[index], read)
        dots = weighted_dots(raw, out, blocks, used, rates)
        return {blocks[index]: dot for index, dot in zip(used, dots.unbind(), strict=True)}

    def _zero(self) -> Tensor:
        first = self.blocks[0]
        dtype = torch.promote_types(first.dtype, torch.float32)
        return torch.zeros((), dtype=dtype, device=first.device)

    def tensors(self) -> Iterator[Tensor]:
        """What is kept beside the parts, until they or the damping change."""
        yield from (value for value in self._cache.values() if isinstance(value, Tensor))


def stacked(blocks: Iterable[Block]) -> list[Stack]:
    """Stacks of all blocks that are ready."""
    groups: dict[Any, list[Block]] = {}
    for block in blocks:
        if block.ready:
            shapes = tuple(
                (name, part.shape, part.dtype)
                for name, parts in sorted(block.parts.items())
                for part in parts
            )
            key = (
                block.structure,
                block.inverse,
                block.shape,
                block.normalises,
                block.device,
                shapes,
            )
            groups.setdefault(key, []).append(block)
    return [Stack(members) for members in groups.values()]


def weighted_dots(
    raw: Tensor, out: Tensor, blocks: list[Block], used: list[int], rates: Rates
) -> Tensor:
    """``lr_i^2 |<raw_i, out_i>|`` of those used, for ``[count, groups, rows, cols]``; weight and
    bias of a layer may have learning rates of their own."""
    distinct = [{rates(p) for p in blocks[index].parameters} for index in used]
    if len(used) == len(blocks) and all(len(each) == 1 for each in distinct):
        dots: Tensor = torch.linalg.vecdot(raw.flatten(1), out.flatten(1)).abs()
        squares = torch.tensor([each.pop() ** 2 for each in distinct], dtype=raw.dtype)
        return dots * squares.to(raw.device, non_blocking=True)
    found = []
    for index in used:
        layer, product = blocks[index].layers[0], raw[index] * out[index]
        own = raw.new_zeros(())
        if layer.weight is not None:
            own += rates(layer.weight) ** 2 * product[..., : layer.weight_cols].sum()
        if layer.bias is not None:
            own += rates(layer.bias) ** 2 * product[..., -1].sum()
        found.append(own.abs())
    return torch.stack(found)
