"""From a captured input and gradient to the sums of a block's factors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from natgrad.comm.layouts import whole
from natgrad.layers import SharedInput
from natgrad.layers.base import real
from natgrad.runtime.blocks import Block
from natgrad.runtime.capture import Pass, Use
from natgrad.runtime.mixed import no_autocast
from natgrad.runtime.timing import Stopwatch
from natgrad.structures import Sum, Sums

# Names the factors of a block that are to be updated in this step.
Wanted = Callable[[Block], list[str]]


class Statistics:
    """Adds pairs to sums, memory constant in their number."""

    def __init__(self, wanted: Wanted, watch: Stopwatch) -> None:
        self.wanted, self.watch = wanted, watch
        self.complete: Callable[[Block, Pass], None] | None = None  # of a block in a pass
        # The last input whose second moment was summed, and where: layers on one input (query, key,
        # value) need it once. Holding the input keeps its address from being used again.
        self._last: tuple[Any, Tensor, Block, Sum] | None = None

    @torch.no_grad()
    def add(self, use: Use, x: Any, g: Tensor, this: Pass, draw: int = 0) -> None:
        """``draw`` counts the gradients of one forward pass; inputs are added with the first."""
        block, _ = use
        # Until now activations stay as they are spread; all ranks of a layer come here together.
        self._add(use, whole(x), whole(g), this, draw, self.wanted(block))
        this.added[block] += 1
        if self.complete is not None and not draw and this.added[block] == this.calls[block]:
            self.complete(block, this)

    def _add(self, use: Use, x: Any, g: Tensor, this: Pass, draw: int, names: list[str]) -> None:
        block, layer = use
        if block.region_terms is not None:
            # Of all that a sample's loss is a mean over, each is then one sample: N g -> N √r g.
            g = g * (len(g) * block.region_terms / (this.samples or len(g) or 1)) ** 0.5
        if draw:
            names = [name for name in names if block.factors[name].of_gradients]
        sums = block.open(names, real(g.dtype))
        with no_autocast(block.device):
            if block.normalises:
                with self.watch("norm"):
                    self._pool(use, x, g, sums, this, draw)
                return
            with self.watch("A"):
                rest = self._inputs(use, x, g, sums)
            with self.watch("G"):
                block.structure.add(layer, x, g, rest)
                self._pool(use, x, g, sums, this, draw)

    def flush(self, this: Pass) -> None:
        """Add what still waits for calls that no gradient came back to."""
        for (block, role, draw), pieces in this.pending.items():
            self._absorb(block, role, pieces, draw)
        this.pending.clear()

    def forget(self) -> None:
        self._last = None

    def _inputs(self, use: Use, x: Any, g: Tensor, sums: Sums) -> Sums:
        """Add the inputs' part; returns the sums that are left."""
        block, layer = use
        mine = {name: total for name, total in sums.items() if name in ("A", "Gt")}
        rest = {name: total for name, total in sums.items() if name not in mine}
        rows = isinstance(layer, SharedInput) and layer.input_is_rows and isinstance(x, Tensor)
        if "A" in mine and rows:
            columns = (layer.weight_cols, layer.bias is None)
            key = (x.data_ptr(), x.shape, x.stride(), x.dtype, x._version, columns)
            fresh = mine["A"].count == 0
            last = self._last
            shared = last is not None and last[0] == key and last[2] is not block
            if last is not None and shared and not block.structure.pooled:
                source = last[3]  # which the block itself may have sent off already
                mine["A"].kept.add_(source.kept)
                mine["A"].count += source.count
                block.twin = last[2]
                return rest
            block.structure.add(layer, x, g, mine)
            # Only a sum that holds nothing else can be handed on.
            self._last = (key, x, block, mine["A"]) if fresh and mine["A"].count else None
            return rest
        block.structure.add(layer, x, g, mine)
        return rest

    def _pool(self, use: Use, x: Any, g: Tensor, sums: Sums, this: Pass, draw: int) -> None:
        """Bring the calls on one sample together, then add its gradient."""
        block, layer = use
        structure = block.structure
        if not structure.pooled:
            return
        role, calls = structure.role(layer), this.calls[block]
        regions = block.region_terms is not None
        samples = len(g) if regions else this.samples
        same_samples = samples is None or len(g) % max(1, samples) == 0
        if calls <= 1 or regions or not same_samples:
            for piece in structure.summaries(layer, x, g, samples):
                structure.absorb(role, piece, sums, block.parts)
            return
        pieces = list(structure.summaries(layer, x, g, this.samples))
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
        for piece in pieces:
            block.structure.absorb(role, piece, sums, block.parts)
