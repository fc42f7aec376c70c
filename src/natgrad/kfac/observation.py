"""Backward passes of drawn or enumerated targets, for a Fisher that is not the empirical one.

The Fisher is a mean over targets of the model's own distribution, not over those of the data. Its
vectors (drawn for Monte-Carlo, all roots of the output Hessian for the exact one) are sent back
from the output to the outputs of the layers and no further: weights get no gradient from them, and
the pass for ``loss.backward()`` stays as it is.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.autograd.graph import GradientEdge

from natgrad.capture.blocks import Block
from natgrad.capture.hooks import Capture
from natgrad.capture.output_hooks import observed
from natgrad.capture.passes import Pass
from natgrad.capture.statistics import Statistics
from natgrad.comm.layouts import full_tensor, reshard_like
from natgrad.curvature.fisher import Fisher, MonteCarloFisher
from natgrad.errors import CaptureError, SettingError


class Observation:
    """Sends the vectors of a Fisher back to the outputs of the layers, and no further: no gradient
    of a weight is computed, and ``.grad`` is not touched."""

    def __init__(
        self, curvature: Fisher, capture: Capture, statistics: Statistics, rank: int
    ) -> None:
        self.curvature, self.capture, self.statistics = curvature, capture, statistics
        self.rank = rank  # each draws for its own samples; those that see the same are one here
        self.generator: torch.Generator | None = None
        self.on_complete: Callable[[Block, Pass], None] | None = None  # of a block in a pass

    def __call__(self, output: Tensor, targets: Tensor | None, scale: float) -> None:
        """``output`` of the last forward pass, before its backward pass."""
        this = self.capture.current
        if this is None or not this.tape:
            raise CaptureError(
                "observe() was called but no layer of the model was, since the last step: call the "
                "model that KFAC was given first (a checkpointed one with use_reentrant=False)."
            )
        self.send_back(this, output, output.detach(), targets, scale)

    def send_back(
        self,
        this: Pass,
        start: Tensor | GradientEdge,
        output: Tensor,
        targets: Tensor | None,
        scale: float,
    ) -> None:
        """From ``start``, where ``output`` came from, to the outputs of all layers. Also from
        inside of a backward pass that has not gone further than there."""
        self.capture.outputs.pop(this, None)  # the pass below comes by the prediction, too
        edges: dict[tuple[object, int], GradientEdge] = {
            (edge.node, edge.output_nr): edge for _, _, edge, _ in this.tape
        }
        tape = [(use, full_tensor(x), edge, view) for use, x, edge, view in this.tape]
        self.capture.mark_returned(this)
        generator = self._generator(output.device)
        likelihood = getattr(self.curvature, "likelihood", None)
        if likelihood is not None:
            this.drawn += likelihood.terms(full_tensor(output), full_tensor(targets))
        vectors = self.curvature.vectors(full_tensor(output), full_tensor(targets), generator)
        found_any = False
        for draw, vector in enumerate(vectors):
            observed.add(self.capture.root)
            try:
                found = torch.autograd.grad(
                    start,
                    list(edges.values()),
                    reshard_like((scale * vector).to(output.dtype), output),
                    retain_graph=True,
                    allow_unused=True,
                )
            finally:
                observed.discard(self.capture.root)
            grads = dict(zip(edges, found, strict=True))
            found_any |= any(g is not None for g in found)
            for use, x, edge, view in tape:
                g = grads[edge.node, edge.output_nr]
                if g is not None:
                    g = view(g)
                    this.widen(use[1], len(g))
                    self.statistics.add(use, x, g, this, draw)
        if not found_any:
            raise CaptureError(
                "observe() was given an output that is not of the model's last forward pass: call "
                "it before the model is called again."
            )
        if self.on_complete is not None:
            for block in dict.fromkeys(use[0] for use, *_ in this.tape):
                self.on_complete(block, this)
        this.tape.clear()

    def state(self, device: torch.device) -> Tensor | None:
        """Where this rank's generator stands, if there is one."""
        generator = self._generator(device)
        return None if generator is None else generator.get_state()

    def load(self, states: Sequence[Tensor] | None, device: torch.device, size: int) -> None:
        """Continue drawing where the saved generators, one a rank, stopped.

        For another number of ranks than was saved, new ones are seeded from all of the old ones:
        the same at every attempt, and unlike anything drawn before."""
        self.generator = None
        if states is None or not isinstance(self.curvature, MonteCarloFisher):
            return
        self.generator = self.curvature.generator(device, self.rank)
        if len(states) == size:
            self.generator.set_state(states[self.rank])
            return
        digest = sha256(repr((self.rank, size, [state.tolist() for state in states])).encode())
        self.generator.manual_seed(int.from_bytes(digest.digest()[:4], "big"))

    def _generator(self, device: torch.device) -> torch.Generator | None:
        if isinstance(self.curvature, MonteCarloFisher) and self.generator is None:
            self.generator = self.curvature.generator(device, self.rank)
        return self.generator


class Observing:
    """The methods of `natgrad.KFAC` that show a Fisher what the model has predicted."""

    scaler: GradScaler | None
    capture: Capture
    curvature: Fisher
    observation: Observation

    def observe(self, output: Tensor, targets: Tensor | None = None) -> None:
        """Show the model's output, before ``loss.backward()``, to a Fisher that is not empirical.

        Needed only where K-FAC cannot see it for itself: where it is not what the model returns
        (itself, its ``logits``, or the first tensor of a tuple or mapping), where some positions
        are ignored, or in compiled models. Free on steps that update nothing.

        Arguments:
            output: what the model has returned, with its graph.
            targets: only say which positions are ignored.
        """
        if self.curvature.of_residuals:
            raise SettingError(
                f"observe() shows outputs, but {self.curvature!r} looks at residuals: call "
                "kfac.residuals(...)."
            )
        if self.capture.armed and self.curvature.observes:
            self.observation(output, targets, self._loss_scale())

    def observe_prediction(self, this: Pass, start: GradientEdge, output: Tensor) -> None:
        """As the backward pass reaches what the model has predicted, if nobody has observed it.

        Arguments:
            this: the forward pass that it is the prediction of.
            start: where it came from in the graph.
            output: what the model has predicted.
        """
        self.observation.send_back(this, start, output, None, self._loss_scale())

    def _loss_scale(self) -> float:
        return self.scaler.get_scale() if self.scaler is not None else 1.0
