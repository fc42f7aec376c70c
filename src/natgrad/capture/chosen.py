"""The samples of a pass that enter its statistics, where that is a share of them.

Which ones is decided as the model is called (`Chooser`), so that all its layers see the same. A
layer's tensors are cut down to them before anything is multiplied, with all positions of a sample:
where ``[n, ...]`` has ``n = k N`` rows for ``N`` samples, rows ``i k`` to ``i k + k`` are of sample
``i``. A tensor whose rows are no multiple enters whole, and its gradients count for less.

An input is usually saved by autograd as well, until the gradient of its weight is there: to hold on
to all of it costs nothing, and a cut would be a copy. Under autocast, or where something
packs saved tensors (offloading), autograd has a copy of its own and only K-FAC would hold the
input: there it is cut at once.
"""

from typing import Any

import torch
from torch import Tensor

from natgrad.capture.blocks import Block
from natgrad.capture.passes import Pass
from natgrad.comm import Communicator
from natgrad.comm.layouts import is_sharded
from natgrad.curvature.subsample import Subsample
from natgrad.layers import Layer
from natgrad.layers.experts import Expert


class Chooser:
    """Numbers the samples of a step. ``rank`` of ``ranks`` that see different samples."""

    def __init__(self, subsample: Subsample, rank: int, ranks: int, device: torch.device) -> None:
        self.subsample, self.rank, self.ranks, self.device = subsample, rank, ranks, device
        self.step = self.seen = 0

    def begin(self, step: int) -> None:
        self.step, self.seen = step, 0

    def choose(self, this: Pass) -> None:
        """Which samples of a pass enter; all of one that does not know how many it has."""
        if this.samples is None:
            return
        found = self.subsample(self.step, self.seen, this.samples, self.rank, self.ranks)
        self.seen += this.samples
        if found is not None:
            this.choose(torch.from_numpy(found).to(self.device))


def chooser_of(
    subsample: Subsample | None, comm: Communicator, sampling_rank: int, device: torch.device
) -> Chooser | None:
    """Ranks of one ``sampling_rank`` see the same samples (tensor parallelism). A collective, if
    there is anything to choose."""
    if subsample is None:
        return None
    apart = sorted(set(comm.gather(sampling_rank)))
    return Chooser(subsample, apart.index(sampling_rank), len(apart), device)


class Cut:
    """What is left of an input after it was cut down to the chosen samples."""

    def __init__(self, x: Any) -> None:
        self.x = x


class Cutter:
    """Cuts tensors down to the chosen samples, once for layers that share an input."""

    def __init__(self) -> None:
        self.last: tuple[Any, Any, Any] | None = None  # the input that was cut last; may be dropped

    def early(self, block: Block, layer: Layer[Any], x: Any, this: Pass) -> Any:
        """In the forward pass: cut if nobody else holds the input."""
        if this.chosen is None or not isinstance(x, Tensor) or is_sharded(x):
            return x
        packed = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        if not packed and not torch.is_autocast_enabled(x.device.type):
            return x
        rows = self._rows(block, layer, len(x), this)
        return x if rows is None else Cut(self._input(layer, x, rows))

    def __call__(
        self, block: Block, layer: Layer[Any], x: Any, g: Tensor, this: Pass
    ) -> tuple[Any, Tensor, int | None]:
        """Input and gradient of the chosen samples, and how many these are."""
        if this.chosen is None:
            return x, g, this.samples
        rows = self._rows(block, layer, len(g), this)
        if isinstance(x, Cut):
            assert rows is not None  # of the same call
            return x.x, g.index_select(0, rows), len(this.chosen)
        some = None if rows is None else self._input(layer, x, rows)
        if rows is None or some is None:
            return x, g * this.share**0.5, this.samples
        return some, g.index_select(0, rows), len(this.chosen)

    def _rows(self, block: Block, layer: Layer[Any], count: int, this: Pass) -> Tensor | None:
        """Which of a layer's rows are of the chosen samples, where that can be told: those that an
        expert sees are in no order."""
        if block.region_terms is not None or isinstance(layer, Expert):
            return None
        return this.chosen_rows(count)

    def _input(self, layer: Layer[Any], x: Any, rows: Tensor) -> Any:
        if not isinstance(x, Tensor):
            return layer.some(x, rows)
        key = (x.data_ptr(), x.shape, x.stride(), x.dtype, x._version, id(rows))
        if self.last is None or self.last[0] != key:
            # The input is held, so that its address is not used again.
            self.last = key, (x, rows), layer.some(x, rows)
        return self.last[2]
