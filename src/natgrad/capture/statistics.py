"""From pairs of input and output gradient to the sums of a block's factors.

    A: sum_{n,s} a a^T, with the number of positions        G: sum_{n,s} g g^T

Sums carry no scale. The number N of samples of a step is only known at the step, as further
micro-batches may come; then A is divided by its count, and G is multiplied by what makes ``g`` the
gradient of one sample's own loss (`natgrad.kfac.settings`). So ``G x A`` is the mean per-sample
Fisher block at any batch size, number of micro-batches and image size.

Two things make this more than a call of ``structure.add``. Layers that are called with one input
(query, key and value) share the sums of their input factors, if these say that nothing else enters
them (`Factor.of_inputs`). And structures of whole samples (``pooled``) need all calls of a module
in one pass before anything is squared, as ``(g1 + g2)^2`` is not ``g1^2 + g2^2``: summaries of
calls wait for each other. Kronecker-expand needs no pooling: a call is a further position there.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from natgrad.capture.blocks import Block
from natgrad.capture.chosen import Cutter
from natgrad.capture.passes import Pass
from natgrad.capture.stopwatch import Stopwatch
from natgrad.capture.tensor_hooks import Use
from natgrad.capture.wrappers import no_autocast
from natgrad.comm.layouts import full_tensor
from natgrad.layers import SharedInput
from natgrad.layers.base import real
from natgrad.layers.experts import Expert
from natgrad.structures import Sums

# The factors of each block that this step updates; those of other blocks are left alone.
Due = Mapping[Block, Sequence[str]]


class _SharedInputSums(NamedTuple):
    """An input, and the sums that nothing but it has entered yet."""

    key: tuple[Any, ...]
    x: Tensor  # held, so that its address is not used again
    block: Block
    sums: Sums


class Statistics:
    """Adds pairs to sums, memory constant in their number."""

    def __init__(self, watch: Stopwatch) -> None:
        self.watch = watch
        self.due: Due = {}
        # Called when all gradients of a block in a pass have been added: its sums may be sent.
        self.on_complete: Callable[[Block, Pass], None] | None = None
        self._shared: _SharedInputSums | None = None
        self._cut = Cutter()
        self._stacks: set[int] = set()  # of experts, some of which had rows since the last step

    def begin(self, due: Due) -> None:
        """A new step, that updates these factors."""
        self.due, self._shared = due, None
        self._cut.last = None
        self._stacks.clear()

    @torch.no_grad()
    def add(self, use: Use, x: Any, g: Tensor, this: Pass, draw: int = 0) -> None:
        """``draw`` counts the gradients of one forward pass; inputs are added with the first."""
        block, layer = use
        if isinstance(layer, Expert):
            self._stacks.add(id(layer.stack))
        # DTensors are gathered only here: all ranks of a sharded layer reach this line together.
        x, g = full_tensor(x), full_tensor(g)
        if block.region_terms is not None:
            # Each region then counts as one sample: N g -> N √r g.
            g = g * (len(g) * block.region_terms / (this.samples or len(g) or 1)) ** 0.5
        x, g, samples = self._cut(block, layer, x, g, this)
        names = self.due.get(block, ())
        if draw:
            names = [name for name in names if block.factors[name].of_gradients]
        sums = block.open(names, real(g.dtype))
        with no_autocast(block.device):
            if block.normalises:
                with self.watch("norm"):
                    self._pool(use, x, g, samples, sums, this, draw)
            else:
                with self.watch("A"):
                    rest = self._add_inputs(use, x, g, sums)
                with self.watch("G"):
                    block.structure.add(layer, x, g, rest)
                    self._pool(use, x, g, samples, sums, this, draw)
        this.added[block] += 1
        if self.on_complete is not None and not draw and this.added[block] == this.calls[block]:
            self.on_complete(block, this)

    def flush(self, this: Pass) -> None:
        """The pass is over: add what still waits for calls that no gradient came back to."""
        self._shared = None  # no layer with the same input follows
        self._cut.last = None
        for (block, role, draw), pieces in this.pending.items():
            self._absorb(block, role, pieces, draw)
        this.pending.clear()
        if self._stacks:
            self._count_idle_experts()

    def _count_idle_experts(self) -> None:
        """Of samples that sent an expert no row the gradient is 0, as that of a linear layer which
        is called on no rows; there is nothing to be said of its inputs."""
        for block, names in self.due.items():
            layer = block.layers[0]
            if not (isinstance(layer, Expert) and id(layer.stack) in self._stacks):
                continue
            own = [name for name in names if block.factors[name].of_gradients]
            for total in block.open(own, real(layer.stack.dtype)).values():
                total.count = total.count or 1

    def _add_inputs(self, use: Use, x: Any, g: Tensor, sums: Sums) -> Sums:
        """Add what is of the inputs alone, or take it over from a layer with the same input;
        returns the sums that are left."""
        block, layer = use
        mine = {name: total for name, total in sums.items() if block.factors[name].of_inputs}
        if not mine:
            return sums
        rest = {name: total for name, total in sums.items() if name not in mine}
        if not (isinstance(layer, SharedInput) and layer.input_is_rows and isinstance(x, Tensor)):
            block.structure.add(layer, x, g, mine)
            return rest
        where = (x.data_ptr(), x.shape, x.stride(), x.dtype, x._version)
        what = (block.structure, tuple(mine), layer.weight_cols, layer.bias is None)
        last, self._shared = self._shared, None
        if last is not None and last.key == (where, what) and last.block is not block:
            for name, total in mine.items():
                source = last.sums[name]  # which the block itself may have sent off already
                total.kept.add_(source.kept)
                total.count += source.count
            block.share_input(last.block)
            self._shared = last
            return rest
        fresh = all(total.count == 0 for total in mine.values())
        block.structure.add(layer, x, g, mine)
        # Only sums that hold nothing else can be handed on.
        if fresh and all(total.count for total in mine.values()):
            self._shared = _SharedInputSums((where, what), x, block, mine)
        return rest

    def _pool(
        self,
        use: Use,
        x: Any,
        g: Tensor,
        samples: int | None,
        sums: Sums,
        this: Pass,
        draw: int,
    ) -> None:
        """Bring the calls on one sample together, then add its gradient; ``samples`` are there."""
        block, layer = use
        structure = block.structure
        if not structure.pooled:
            return
        role, calls = structure.role(layer), this.calls[block]
        regions = block.region_terms is not None
        samples = len(g) if regions else samples
        same_samples = samples is None or len(g) % max(1, samples) == 0
        if calls <= 1 or regions or not same_samples:
            decomposed = block.decomposed_factors()
            for piece in structure.summaries(layer, x, g, samples):
                structure.absorb(role, piece, sums, decomposed)
            return
        pieces = list(structure.summaries(layer, x, g, samples))
        key = (block, role, draw)
        if (waiting := this.pending.get(key)) is not None:
            pieces = [structure.combine(a, b) for a, b in zip(waiting, pieces, strict=True)]
        this.pending[key] = pieces
        this.arrived[block, draw] += 1
        if this.arrived[block, draw] == calls:
            for key in [k for k in this.pending if k[0] is block and k[2] == draw]:
                self._absorb(block, key[1], this.pending.pop(key), draw)

    def _absorb(self, block: Block, role: str, pieces: list[tuple[Tensor, ...]], draw: int) -> None:
        sums = {
            name: total
            for name, total in block.sums.items()
            if draw == 0 or block.factors[name].of_gradients
        }
        decomposed = block.decomposed_factors()
        for piece in pieces:
            block.structure.absorb(role, piece, sums, decomposed)
