"""Blocks of one shape, preconditioned together: small products cost more to start than to do."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.linalg.workspace import workspace
from natgrad.runtime.blocks import Block

Rates = Callable[[nn.Parameter], float]


class Stack:
    """The parts of its blocks lie one behind the other in the same tensors."""

    def __init__(self, blocks: list[Block]) -> None:
        self.blocks = blocks
        first = blocks[0]
        self.structure, self.inverse, self.normalises = (
            first.structure,
            first.inverse,
            first.normalises,
        )
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

    def precondition(self, damping: float, rates: Rates) -> Tensor:
        """Replace the gradients; returns ``sum lr^2 <preconditioned, raw>`` over the blocks (P17)."""
        if self._versions != (now := [block.version for block in self.blocks]):
            self._cache, self._versions = {}, now
        first = self.blocks[0]
        groups, rows, cols = first.shape
        count = len(self.blocks)
        dtype = torch.promote_types(first.dtype, torch.float32)
        like = torch.empty(0, dtype=dtype, device=first.device)
        raw = workspace("raw", (count * groups * rows * cols,), like)
        raw = raw.view(count, groups, rows, cols)
        used = []
        for index, block in enumerate(self.blocks):
            if has_gradient(block):
                block.layers[0].load(raw[index], gradient)
                used.append(index)
            else:
                raw[index].zero_()
        out = self.structure.precondition(
            self.parts, self.inverse, raw.flatten(0, 1), damping, self._cache
        ).view_as(raw)
        for index in used:
            self.blocks[index].layers[0].store(out[index], gradient)
        return weighted_dot(raw, out, [self.blocks[i] for i in used], used, rates)

    def multiply(self, displacements: list[Tensor], damping: float) -> Tensor:
        """``sum <d, F d>`` over the blocks, for a displacement ``[groups, rows, cols]`` of each."""
        d = torch.stack(displacements).flatten(0, 1)
        return torch.sum(d * self.structure.multiply(self.parts, self.inverse, d, damping))


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


def gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def has_gradient(block: Block) -> bool:
    return all(p.grad is not None for p in block.parameters)


def weighted_dot(
    raw: Tensor, out: Tensor, blocks: list[Block], used: list[int], rates: Rates
) -> Tensor:
    """``sum_i lr_i^2 <raw_i, out_i>`` for ``[count, groups, rows, cols]``; weight and bias of a layer
    may have learning rates of their own."""
    total = raw.new_zeros(())
    for index, block in zip(used, blocks, strict=True):
        layer = block.layers[0]
        per_parameter = {rates(p) for p in layer.parameters}
        if len(per_parameter) == 1:
            (rate,) = per_parameter
            total += rate**2 * torch.dot(raw[index].flatten(), out[index].flatten())
            continue
        product = raw[index] * out[index]
        if layer.weight is not None:
            total += rates(layer.weight) ** 2 * product[..., : layer.weight_cols].sum()
        if layer.bias is not None:
            total += rates(layer.bias) ** 2 * product[..., -1].sum()
    return total
