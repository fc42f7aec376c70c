"""Backward passes of drawn or enumerated targets, for a Fisher that is not the empirical one."""

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from natgrad.curvature.fisher import Fisher, MonteCarloFisher
from natgrad.errors import CaptureError
from natgrad.runtime.capture import Capture
from natgrad.runtime.statistics import Statistics


class Observation:
    """Sends the vectors of a Fisher back to the outputs of the layers, and no further: no gradient
    of a weight is computed, and ``.grad`` is not touched."""

    def __init__(self, curvature: Fisher, capture: Capture, statistics: Statistics) -> None:
        self.curvature, self.capture, self.statistics = curvature, capture, statistics
        self.generator: torch.Generator | None = None

    def __call__(self, output: Tensor, targets: Tensor | None, scale: float) -> None:
        this = self.capture.current
        if this is None or not this.tape:
            raise CaptureError(
                "observe() was called but no layer of the model was, since the last step: call the "
                "model that KFAC was given first (a checkpointed one with use_reentrant=False)."
            )
        edges: dict[tuple[object, int], GradientEdge] = {
            (edge.node, edge.output_nr): edge for _, _, edge, _ in this.tape
        }
        vectors = self.curvature.vectors(output, targets, self._generator(output.device))
        for draw, vector in enumerate(vectors):
            found = torch.autograd.grad(
                output,
                list(edges.values()),
                (scale * vector).to(output.dtype),
                retain_graph=True,
                allow_unused=True,
            )
            grads = dict(zip(edges, found, strict=True))
            for use, x, edge, view in this.tape:
                g = grads[edge.node, edge.output_nr]
                if g is not None:
                    g = view(g)
                    this.rows = max(this.rows, len(g))
                    self.statistics.add(use, x, g, this, draw)
        self.capture.returned(this)
        this.tape.clear()

    def load(self, state: Tensor | None, device: torch.device) -> None:
        """Continue drawing where a saved generator stopped."""
        self.generator = None
        if state is not None and isinstance(self.curvature, MonteCarloFisher):
            self.generator = self.curvature.generator(device)
            self.generator.set_state(state)

    def _generator(self, device: torch.device) -> torch.Generator | None:
        if isinstance(self.curvature, MonteCarloFisher) and self.generator is None:
            self.generator = self.curvature.generator(device)
        return self.generator
