"""Hooks: every layer's input with the gradient of its output, and no work between updates.

Curvature needs pairs ``(x, g)`` of the same call. A module's forward and backward hooks see calls,
but not which gradient belongs to which input. So a forward hook puts a hook on the output *tensor*,
and that hook holds the input: modules that are called twice, in-place activations, both kinds of
activation checkpointing, unused modules and evaluation passes all come out right.

- A pass counts once a gradient has come back to it (`natgrad.capture.passes`) on its way to the
  parameters: evaluation does not, nor a pass through a frozen network or to its input alone.
- A hook drops its input after use, as autograd does, unless the graph is retained. Otherwise all
  activations would be held until the end of the backward pass. Where it is retained, another
  backward pass may follow: their gradients are added before anything is squared, since those of two
  losses are those of their sum.
- Hooks are on the layers only on steps that update factors. On all others forward and backward
  call no function of natgrad, but for two hooks on the model where samples must be counted.
- A loss may depend on gradients (a PINN, a gradient penalty), which use the weights again:
  `natgrad.capture.inner_uses` finds these uses, or refuses what it cannot count.
- Attention and recurrent layers call functions on their weights, others use a parameter in an
  expression: `natgrad.capture.watching` has what watches each of them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from natgrad.capture.accounts import Account
from natgrad.capture.backwards import RECOMPUTED, THROWN_AWAY, Backwards, reaches
from natgrad.capture.blocks import Block
from natgrad.capture.chosen import Chooser, Cutter
from natgrad.capture.module_hooks import Hooks, in_backward
from natgrad.capture.output_hooks import OutputHook, WeightsHook, observed, on_gradient
from natgrad.capture.passes import Pass, Threads, prediction, tensors_of
from natgrad.capture.sample_axes import SampleAxes
from natgrad.capture.tensor_hooks import FollowingHook, GradientHook, Use, View
from natgrad.capture.watching import Watch, watches_of
from natgrad.errors import CaptureError
from natgrad.layers import Layer
from natgrad.layers.bare import Bare


class Capture:
    """``on_pair(use, x, g, pass)`` is called for every input with the gradient of its output."""

    def __init__(
        self,
        root: nn.Module,
        blocks: list[Block],
        on_pair: Callable[[Use, Any, Tensor, Pass], None],
        *,
        taping: bool,
        batch_axis: int,
        chooser: Chooser | None = None,
    ) -> None:
        self.root, self.on_pair, self.taping, self.batch_axis = root, on_pair, taping, batch_axis
        self.uses: list[Use] = [(block, layer) for block in blocks for layer in block.layers]
        self.on_begin: Callable[[], None] | None = None  # before a forward pass that is watched
        self.on_restart: Callable[[], None] | None = None  # what was seen counts no longer
        self.axes, self.chooser, self._cut = SampleAxes(root), chooser, Cutter()
        self.backwards = Backwards(p for block in blocks for p in block.parameters)
        self.current: Pass | None = None
        self.place = 0  # of the samples' number among the sizes that the model is called with
        self.inside = False  # whether the model's own forward is running
        self.passes: list[Pass] = []
        # Where the backward pass of each output begins, and what is done as it does. Nothing that
        # the graph itself holds may hold its edges: it would never be freed.
        self.outputs: dict[Pass, tuple[GradientEdge, Tensor]] = {}
        self.on_output: Callable[[Pass, GradientEdge, Tensor], None] | None = None
        self.waiting: dict[GradientHook, None] = {}  # for further gradients of a retained graph
        self._before: Pass | None = None
        self.reads = False  # the weights of the loss's terms, at the model's output
        self.restarted = False  # a pass before was thrown away
        self.expects_restarts = False  # which is as it should be
        # Why a loss with gradients in it is refused; a layer without a graph before the backward.
        self.second_order = self.recomputed = ""
        self.threads = Threads()
        self.follows = not taping  # whether uses of weights in gradients are looked for
        self.ignores = False  # what is called now is no part of the statistics
        self.aside: int | None = None  # a backward pass whose gradients are not those of a loss
        self.taped: dict[Pass, None] = {}  # passes with a tape, where several may have a part
        self.skipped = False  # a backward pass built a graph, so its gradients were not taken
        self._layer_hooks, self._root_hooks = Hooks(), Hooks()
        self._watches: dict[nn.Module, Watch] = {}
        self.account = Account()  # of parameters that are used in expressions
        self.armed = False  # whether layers are watched, also if the model has lost all of them

    # Hooks come and go.

    def watch(self, *, layers: bool, samples: bool) -> None:
        """Have hooks on every layer, or none; and on the model itself, to count samples."""
        if layers:
            self.arm()
        elif self.armed:
            self.disarm()
        if samples != bool(self._root_hooks.handles):
            self.count_samples(samples)

    def count_samples(self, wanted: bool) -> None:
        """Two hooks on the model itself."""
        if wanted and not self._root_hooks.handles:
            before = (self.root.register_forward_pre_hook, self._begin, {"with_kwargs": True})
            self._root_hooks.add([before, (self.root.register_forward_hook, self._end, {})])
        elif not wanted:
            self._root_hooks.remove()

    def arm(self) -> None:
        """Hooks on every layer."""
        if self.armed:
            return
        self.armed = True
        self._watches, wanted = watches_of(self, self.uses)
        if bare := [block for block, layer in self.uses if isinstance(layer, Bare)]:
            self.account.open(self, bare)
        self._layer_hooks.add(wanted)

    def disarm(self) -> None:
        while self._watches:  # the model itself may be one, and running
            self._watches.popitem()[1].leave(self.root, (), None)
        self._layer_hooks.remove()
        if self.account.handles:
            self.account.close()
        self.armed = False

    def rewire(self, uses: list[Use]) -> None:
        """Watch these layers from now on."""
        self.uses, armed = uses, self.armed
        self.disarm()
        if armed:
            self.arm()

    def follow(self, blocks: list[Block], uses: list[Use]) -> None:
        """The model has other blocks now, used by these layers."""
        self.backwards.parameters = [p for block in blocks for p in block.parameters]
        self.axes.follow(self.root)
        self.rewire(uses)

    def detach(self) -> None:
        self.disarm()
        self._root_hooks.remove()
        self.forget()

    def forget(self) -> None:
        """Forget everything seen since the last step."""
        self.current, self.passes, self.skipped, self.inside = None, [], False, False
        self.outputs.clear()
        for hook in self.waiting:
            hook.kept = None
        self.waiting = {}
        self.restarted, self.aside = False, None
        self.second_order = self.recomputed = ""
        if self.threads.crossed or self.threads.left:
            self.threads = Threads()
        for this in self.taped:
            this.tape.clear()  # edges of the graph, which holds hooks that hold the pass
        self.taped = {}
        self.backwards.forget()
        if self.account.entries or self.account.stacks:
            self.account.clear()

    def samples(self) -> int | None:
        """The number of samples in all passes since the last step; ``None`` if it is unknown."""
        return sum(p.rows if p.samples is None else p.samples for p in self.passes) or None

    def finish(self, *, counted: bool) -> list[str]:
        """No further gradient will come: take those of graphs that were retained, and refuse what
        is not whole. Returns what the user should know of this step's statistics. ``counted``: the
        number of samples is the one that was found here."""
        if self.backwards.running:
            self.backwards.outside()
        if self.backwards.failed and not self.threads.crossed:
            raise CaptureError(
                "A backward pass since the last step failed in the middle, and what it left in the "
                "gradients and statistics is still there: call optimizer.zero_grad() and "
                "kfac.discard() after such a failure, and do the batch again."
            )
        if self.recomputed:
            raise CaptureError(RECOMPUTED.format(self.recomputed))
        if why := self.threads.crossed or self.second_order:
            raise CaptureError(why)
        for hook in list(self.waiting):
            hook.finish()
        found = [this.doubt for this in self.passes if this.doubt and counted]
        if self.restarted:
            found.append(THROWN_AWAY)
        return [*found, *self.axes.doubts]

    def sets_aside(self) -> bool:
        """Whether the backward pass that is running is one that does not count."""
        return bool(torch._C._current_graph_task_id() == self.aside)

    # What hooks do.

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.ignores:
            return
        again = in_backward()
        if not again:
            self.backwards.outside()
            before = self._watches.get(module)
            if self.on_begin is not None:
                self.on_begin()
            if (watch := self._watches.get(module)) is not None and watch is not before:
                watch.enter(module, args, kwargs)  # hooks that come now are not called any more
            self._before, self.inside = self.current, self.threads.begin(self)
        elif self.taping or not (self.current is None or self.current.returned):
            return
        # The whole model checkpointed with use_reentrant=True was run without a graph before.
        self.current = Pass.of((*args, *kwargs.values()), self.batch_axis, again, self.place)
        if self.chooser is not None and self.armed and torch.is_grad_enabled():
            self.chooser.choose(self.current)

    def _end(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if self.ignores:
            return
        this, self.inside = self.current, self.threads.end(self)
        if this is None:
            return
        if not torch.is_grad_enabled():
            if not in_backward():
                self.current = self._before  # an evaluation is no part of what comes
            return
        self._before = self._cut.last = None
        tapes = self.taping and bool(this.tape)
        if (tapes or self.reads) and (main := prediction(out)) is not None:
            if tapes:
                self.outputs[this] = get_gradient_edge(main), main.detach()
                on_gradient(main, OutputHook(self, this).predicts)
            if self.reads:
                on_gradient(main, WeightsHook(self.root, this, main))
        for tensor in tensors_of(out):
            if tensor.requires_grad:
                tensor.register_hook(OutputHook(self, this))

    def counts_at_output(self) -> bool:
        """Whether a gradient at the model's output says that the pass counts. Layers that are
        watched say it themselves: those of a checkpointed model are in a graph of their own."""
        parameters = self.backwards.parameters
        if self.taping:
            return reaches(parameters)
        return not self.armed and any(p.requires_grad for p in parameters)

    def mark_returned(self, this: Pass) -> None:
        """A gradient came back to this pass, so its samples are part of the step."""
        self.backwards.arrived()
        if this.returned:
            return
        before = self.passes or self.backwards.failed
        if not before:
            self.backwards.first()
        if before and self.on_restart is not None and self.backwards.thrown_away():
            kept = self.current, self.threads
            self.on_restart()
            (self.current, self.threads), self.restarted = kept, not self.expects_restarts
        this.returned = True
        this.settle()
        self.place = this.place if this.seen else self.place
        self.passes.append(this)

    def watch_gradient(self, use: Use, x: Any, out: Tensor, view: View) -> None:
        """Put a hook on a layer's output; ``x`` is what the layer keeps of its input."""
        this, block = self.current, use[0]
        assert this is not None  # the call was counted
        x = self._cut.early(*use, x, this)
        this.hooked[block] += 1
        this.recomputed[block] += in_backward()
        if in_backward() and (self.taping or this.hooked[block] > this.calls[block]):
            out.register_hook(partial(self._too_late, use[1]))
        elif self.taping:
            this.tape.append((use, x, get_gradient_edge(out), view))
            if self.follows:
                self.taped[this] = None
                out.register_hook(FollowingHook(self, use, this, view))
        else:
            out.register_hook(GradientHook(self, use, x, this, view))

    def watch_inner(self, use: Use, x: Tensor, out: Tensor, view: View, this: Pass) -> None:
        """Put a hook on the output of a use that is part of a gradient."""
        block = use[0]
        this.calls[block] += 1
        this.hooked[block] += 1
        if self.taping:
            this.tape.append((use, x, get_gradient_edge(out), view))
            out.register_hook(FollowingHook(self, use, this, view))
        else:
            out.register_hook(GradientHook(self, use, x, this, view))

    def _too_late(self, layer: Layer[Any], g: Tensor) -> None:
        """A gradient for an output that was not there as the backward pass began."""
        if self.root not in observed and not torch.is_grad_enabled():
            self.recomputed = f"{layer.kind} {layer.name!r}"

    def count_call(self, block: Block, rows: int, *, alone: bool = False) -> bool:
        """Count a call on so many rows; returns whether its output needs a hook.

        Recomputing a checkpointed segment calls its layers again, inside the backward pass. If the
        first call had a graph the gradient will come to that one; if not (``use_reentrant=True``),
        it comes to this one.
        """
        this, again = self.current, in_backward()
        if this is None or not (again or self.inside or this.fits(rows)):
            self.backwards.outside()
            this = self.current = Pass()  # not the model itself, only a part of it
        if again and not this.again:
            # A reentrant one has a new graph in every backward pass.
            return this.hooked[block] < this.calls[block] or this.recomputed[block] > 0
        this.count(block, rows, alone=alone)
        return True

    def facing(self, use: Use, x: Any) -> Use:
        """The use with its layer as the samples of ``x`` lie; matters for whole samples only."""
        this, (block, layer) = self.current, use
        if this is None or block.region_terms is not None:
            return use
        if not (block.structure.pooled or self.taping or this.chosen is not None):
            return use
        return block, self.axes.facing(layer, x, this.samples)
