"""Blocks of one shape, preconditioned together: small products cost more to start than to do.

A stack is prepared once, when its blocks become ready, and used at every step: the parts of its
blocks lie one behind the other, one `Decomposed` applies them all, and for every parameter there is
a view (`Slot`) of where its gradient lies in the stack's matrices ``[blocks, groups, rows, cols]``.
A step that only applies then copies gradients in, multiplies, and copies them out, without looking
at any layer.

The blocks' own parts become views of the stacked ones: a refresh writes into the stack, and nothing
is kept twice.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from natgrad.capture.blocks import Block
from natgrad.comm.layouts import is_sharded
from natgrad.damping import Damping
from natgrad.inverses import Decomposed, Function
from natgrad.kfac import slices
from natgrad.kfac.clipping import LearningRates
from natgrad.kfac.low_rank import OuterProduct
from natgrad.kfac.motion import Motion, Mover

_LONGEST = 2.0  # times the plain gradient, for a step whose scale is not known

Gradient = Tensor | None
View = Callable[[Tensor], Tensor]


class How(NamedTuple):
    """What a step does with the gradients of a stack: multiplies them by ``scale`` first, so that
    those of all steps are of the same loss, and then damps and follows the momentum; or applies a
    ``function`` of the block and nothing else. ``unknown``: the scale of the loss is not known, and
    steps are as long as their gradients make them."""

    damping: Damping
    momentum: float = 0.0
    scale: float = 1.0
    function: Function | None = None
    unknown: bool = False
    looks: bool = False  # whether to keep what `natgrad.kfac.health` reads


def unknown_scale(products: Tensor) -> Tensor:
    """What a step ``d`` is multiplied by if nothing says how long it is, from ``<d, g>``,
    ``<g, g>`` and ``<d, d>`` of the gradient ``g`` that it follows, ``[3, ...]``.

        <g, g> / <d, g>     to first order it takes as much off the loss as the plain gradient does
        2 |g| / |d|         but it is at most twice as long

    With an exact curvature the first is at most its largest eigenvalue, so that steps are stable
    wherever those of gradient descent are; the second holds where the curvature is an estimate.
    """
    dot, raw, out = products.abs().clamp(min=torch.finfo(products.dtype).tiny)
    return torch.minimum(raw / dot, _LONGEST * (raw / out).sqrt())


class Slot:
    """Where the gradient of a parameter lies in a block's matrix."""

    def __init__(self, block: int, parameter: nn.Parameter, cut: View | None) -> None:
        self.block, self.parameter = block, parameter
        self.cut = cut  # the part of a gradient that belongs to the block; None: all of it

    def of(self, gradient: Tensor) -> Tensor:
        return gradient if self.cut is None else self.cut(gradient)


class Stack:
    """``parameters`` are those of all blocks, one after the other."""

    def __init__(self, blocks: list[Block], order: Sequence[int], motion: Motion) -> None:
        self.blocks, self.shape = blocks, (len(blocks), *blocks[0].shape)
        first = blocks[0]
        self.dtype, self.device = first.wide_dtype, first.device
        parts = first.parts
        if len(blocks) > 1:
            parts = {
                name: tuple(
                    torch.cat([block.parts[name][i] for block in blocks])
                    for i in range(len(first.parts[name]))
                )
                for name in first.parts
            }
            for index, block in enumerate(blocks):
                own = {
                    name: tuple(part.unflatten(0, (len(blocks), -1))[index] for part in stacked)
                    for name, stacked in parts.items()
                }
                block.stack(own)
        self.decomposed: Decomposed = first.decomposed(parts)
        self.numel = prod(self.shape)
        self.order = torch.tensor(order, device=self.device)  # of its blocks among all
        self._versions = [block.version for block in blocks]
        self.mover = Mover(motion, blocks)
        self.looked: tuple[Tensor, Damping] | None = None
        self._rates_version = -1
        self._squares: Tensor | None = None

    def bind(self, raw: Tensor, out: Tensor) -> None:
        """Use the beginning of two buffers, which all stacks share, one after the other."""
        self.raw, self.out = (t[: self.numel].view(self.shape) for t in (raw, out))
        self.slots: list[Slot] = []
        self.raw_views: list[Tensor] = []
        self.out_views: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            for slot, views in _slots(index, block, self.raw[index], self.out[index]):
                self.slots.append(slot)
                self.raw_views.append(views[0])
                self.out_views.append(views[1])
        self.parameters = [slot.parameter for slot in self.slots]
        self._cuts = any(slot.cut is not None for slot in self.slots)

    def check_versions(self) -> None:
        """Forget what was computed from parts that have been replaced since."""
        if self._versions != (now := [block.version for block in self.blocks]):
            self.decomposed.forget()
            self._versions = now

    def precondition(
        self, gradients: list[Gradient], how: How, rates: LearningRates, dots: Tensor
    ) -> bool:
        """Replace the ``gradients``, one for each of ``parameters``, of all blocks that have all of
        theirs. Their ``reach^2 |<preconditioned, raw>|`` go into ``dots``, which has one for
        each block of the model. Returns whether these were all blocks."""
        for gradient in gradients:
            if gradient is None:
                self.precondition_apart(gradients, {}, how, rates, dots)
                return False
        mine = gradients
        if self._cuts:
            mine = [slot.of(g) for slot, g in zip(self.slots, gradients, strict=True)]  # type: ignore[arg-type]
        torch._foreach_copy_(self.raw_views, mine)  # type: ignore[arg-type]
        if how.scale != 1.0:
            self.raw *= how.scale
        if how.function is not None:
            raw, out = self.raw.flatten(0, 1), self.out.flatten(0, 1)
            self.decomposed.apply(how.function, raw, out)
        else:
            self.mover(self.decomposed, self.raw, how.damping, how.momentum, self.out)
        if how.looks:
            self.looked = self._products(), how.damping
        found = self._dots(rates)
        if how.unknown:
            scale = unknown_scale(self._products())
            self.out *= scale.view(-1, 1, 1, 1)
            found = found * scale.square()
        torch._foreach_copy_(mine, self.out_views)  # type: ignore[arg-type]
        # Of one dtype and device for all blocks, which a stack's own may differ from.
        dots[self.order.to(dots.device)] = found.to(dots)
        return True

    def precondition_apart(
        self,
        gradients: list[Gradient],
        outers: dict[Block, OuterProduct],
        how: How,
        rates: LearningRates,
        dots: Tensor,
    ) -> None:
        """Where some blocks have no gradient, or an `OuterProduct` for it, which is written later:
        precondition each of the other blocks by itself."""
        parameters = iter(zip(self.slots, gradients, strict=True))
        by_block: dict[int, list[Gradient]] = {}
        for slot, gradient in parameters:
            by_block.setdefault(slot.block, []).append(gradient)
        for index, block in enumerate(self.blocks):
            place = int(self.order[index])
            if block in outers:
                layer = block.layers[0]
                own = [0.0 if p is None else rates.of(p) for p in (layer.weight, layer.bias)]
                dots[place] = outers[block].dot(*own)
            elif all(gradient is not None for gradient in by_block[index]):
                alone = Stack([block], [place], self.mover.motion)
                alone.bind(self.raw.flatten(), self.out.flatten())
                alone.precondition(by_block[index], how, rates, dots)

    def _products(self) -> Tensor:
        """Inner products of gradients before and after, and squares of both, ``[3, count]``."""
        raw, out = self.raw.flatten(1), self.out.flatten(1)
        return torch.stack([torch.linalg.vecdot(*p) for p in ((raw, out), (raw, raw), (out, out))])

    def _dots(self, rates: LearningRates) -> Tensor:
        """``[count]``; weight and bias of a layer may have learning rates of their own."""
        if self._rates_version != rates.version:
            self._rates_version, self._squares = rates.version, self._squared(rates)
        if self._squares is not None:
            found: Tensor = torch.linalg.vecdot(self.raw.flatten(1), self.out.flatten(1)).abs()
            return found * self._squares
        own = self.raw.new_zeros(len(self.blocks))
        for slot, raw, out in zip(self.slots, self.raw_views, self.out_views, strict=True):
            own[slot.block] += rates.of(slot.parameter) ** 2 * (raw * out).sum()
        return own.abs()

    def _squared(self, rates: LearningRates) -> Tensor | None:
        """Squares of the learning rates ``[count]``, if each block has just one."""
        own: list[set[float]] = [set() for _ in self.blocks]
        for slot in self.slots:
            own[slot.block].add(rates.of(slot.parameter))
        if any(len(each) > 1 for each in own):
            return None
        squares = torch.tensor([each.pop() ** 2 for each in own], dtype=self.dtype)
        return squares.to(self.device, non_blocking=True)


class SlicedStack(Stack):
    """One block, cut along ``axis`` of its matrix: ``numel`` is that of its widest slice."""

    def __init__(self, block: Block, order: int, motion: Motion, axis: int) -> None:
        super().__init__([block], [order], motion)
        self.axis, rows = axis, block.shape[axis]
        self.numel = self.numel // rows * max(p.stop - p.start for p in slices.slices(block, axis))

    def bind(self, raw: Tensor, out: Tensor) -> None:
        (block,) = self.blocks
        self.raw, self.out = raw[: self.numel], out[: self.numel]
        self.matrix = slices.SlicedMatrix(block, self.axis, self.raw, self.out)
        self.parameters = block.parameters

    def precondition(
        self, gradients: list[Gradient], how: How, rates: LearningRates, dots: Tensor
    ) -> bool:
        there = [gradient for gradient in gradients if gradient is not None]
        if len(there) < len(gradients):
            return False
        assert how.function is not None
        dot, products, written = self.matrix.precondition(
            self.decomposed, there, how.function, how.scale, rates, unknown=how.unknown
        )
        if how.unknown:
            scale = unknown_scale(products)
            torch._foreach_mul_(written, scale.to(written[0].dtype))
            dot = dot * scale.square()
        dots[self.order.to(dots.device)] = dot.to(dots)
        return True

    def precondition_apart(
        self,
        gradients: list[Gradient],
        outers: dict[Block, OuterProduct],
        how: How,
        rates: LearningRates,
        dots: Tensor,
    ) -> None:
        (block,) = self.blocks
        if block in outers:
            layer = block.layers[0]
            own = [0.0 if p is None else rates.of(p) for p in (layer.weight, layer.bias)]
            dots[int(self.order[0])] = outers[block].dot(*own)
        else:
            self.precondition(gradients, how, rates, dots)


def stacked(blocks: Iterable[Block], order: dict[Block, int], motion: Motion) -> list[Stack]:
    """Stacks of all blocks that are ready."""
    groups: dict[Any, list[Block]] = {}
    cut: list[Stack] = []
    for block in blocks:
        if not block.ready:
            continue
        shape = block.shape
        axis = slices.sliced_axis(block, motion) if prod(shape) > slices.WHOLE else None
        if axis is not None:
            cut.append(SlicedStack(block, order[block], motion, axis))
        else:
            shapes = tuple(
                (name, part.shape, part.dtype)
                for name, parts in sorted(block.parts.items())
                for part in parts
            )
            key = (
                block.structure,
                block.inverse,
                shape,
                block.normalises,
                block.device,
                shapes,
            )
            groups.setdefault(key, []).append(block)
    whole = [Stack(some, [order[block] for block in some], motion) for some in groups.values()]
    return [*whole, *cut]


def _slots(
    index: int, block: Block, *matrices: Tensor
) -> Iterator[tuple[Slot, tuple[Tensor, ...]]]:
    """The slots of a block's parameters, each with its view of every matrix."""
    layer = block.layers[0]
    if layer.weight is not None:
        cols = layer.weight_cols
        views = tuple(layer.as_weight(m[..., :cols]) for m in matrices)
        yield _slot(index, layer.weight, layer.split, views)
    if layer.bias is not None:
        views = tuple(layer.as_bias_shape(m[..., -1]) for m in matrices)
        yield _slot(index, layer.bias, layer.as_bias, views)


def _slot(
    index: int, parameter: nn.Parameter, cut: View, views: tuple[Tensor, ...]
) -> tuple[Slot, tuple[Tensor, ...]]:
    """A cut that only reshapes is done once, on the views, and not at every step."""
    if not is_sharded(parameter):
        whole = parameter.detach()
        found = cut(whole)
        same_place = found.data_ptr() == whole.data_ptr() and found.numel() == whole.numel()
        if same_place and found.shape == whole.shape and found.stride() == whole.stride():
            return Slot(index, parameter, None), views
        if same_place and found.is_contiguous() and whole.is_contiguous():
            with suppress(RuntimeError):  # strides that no view has
                return Slot(index, parameter, None), tuple(v.view(whole.shape) for v in views)
    return Slot(index, parameter, cut), views
