"""Hooks: every layer's input with the gradient of its output, and no work between updates.

Curvature needs pairs ``(x, g)`` of the same call. A module's forward and backward hooks see calls,
but not which gradient belongs to which input. So a forward hook puts a hook on the output *tensor*,
and that hook holds the input: modules that are called twice, in-place activations, both kinds of
activation checkpointing, unused modules and evaluation passes all come out right.

- A pass counts once a gradient has come back to it (`natgrad.capture.passes`); evaluation does not.
- A hook drops its input after use, as autograd does, unless the graph is retained. Otherwise all
  activations would be held until the end of the backward pass. Where it is retained, another
  backward pass may follow: their gradients are added before anything is squared, since those of two
  losses are those of their sum.
- Hooks are on the layers only on steps that update factors. On all others forward and backward
  call no function of natgrad, but for two hooks on the model where samples must be counted.
- Attention and recurrent layers call functions on their weights, which no module hook sees. A
  function mode watches them during their forward (`natgrad.layers.functional`).
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from natgrad.capture.backwards import SECOND_ORDER, THROWN_AWAY, Backwards
from natgrad.capture.blocks import Block
from natgrad.capture.chosen import Chooser, Cutter
from natgrad.capture.module_hooks import Hooks, Registration, in_backward
from natgrad.capture.passes import Pass, prediction, sample_counts, tensors_of
from natgrad.capture.sample_axes import SampleAxes
from natgrad.errors import CaptureError
from natgrad.layers import Layer
from natgrad.layers.functional import Projection

# Models through which vectors of a Fisher are sent back at this moment: these are no gradients of
# their losses, and no other preconditioner of the same model may take them for that.
observed: set[nn.Module] = set()

Use = tuple[Block, Layer[Any]]
View = Callable[[Tensor], Tensor]


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
        self.inside = False  # the model's own forward is running
        self.passes: list[Pass] = []
        # Where the backward pass of each output begins, and what is done as it does. Nothing that
        # the graph itself holds may hold its edges: it would never be freed.
        self.outputs: dict[Pass, tuple[GradientEdge, Tensor]] = {}
        self.on_output: Callable[[Pass, GradientEdge, Tensor], None] | None = None
        self.waiting: dict[_GradientHook, None] = {}  # for further gradients of a retained graph
        self._before: Pass | None = None
        self.restarted = False  # a pass before was thrown away
        self.second_order = ""  # a layer whose gradient the loss depends on
        self.skipped = False  # a backward pass built a graph, so its gradients were not taken
        self._layer_hooks, self._root_hooks = Hooks(), Hooks()

    # Hooks come and go.
    @property
    def armed(self) -> bool:
        return bool(self._layer_hooks.handles)

    def watch(self, *, layers: bool, samples: bool) -> None:
        """Have hooks on every layer, or none; and on the model itself, to count samples."""
        if layers:
            self.arm()
        elif self._layer_hooks.handles:
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
        if self._layer_hooks.handles:
            return
        watched: dict[nn.Module, list[Use]] = {}
        for use in [use for use in self.uses if use[0].factors]:
            watched.setdefault(use[1].module, []).append(use)
        wanted: list[Registration] = []
        for module, uses in watched.items():
            if isinstance(uses[0][1], Projection):
                watch = _ProjectionHooks(self, uses)
                wanted += [
                    (module.register_forward_pre_hook, watch.enter, {"with_kwargs": True}),
                    # Also after an exception, or the mode would stay on for good.
                    (module.register_forward_hook, watch.leave, {"always_call": True}),
                ]
                continue
            for use in uses:
                how = {"prepend": True, "with_kwargs": True}
                wanted.append((module.register_forward_hook, _ForwardHook(self, use), how))
        self._layer_hooks.add(wanted)

    def disarm(self) -> None:
        self._layer_hooks.remove()

    def rewire(self, uses: list[Use]) -> None:
        """Watch these layers from now on."""
        self.uses, armed = uses, self.armed
        self.disarm()
        if armed:
            self.arm()

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
        self.restarted, self.second_order = False, ""
        self.backwards.forget()

    def samples(self) -> int | None:
        """The number of samples in all passes since the last step; ``None`` if it is unknown."""
        return sum(p.rows if p.samples is None else p.samples for p in self.passes) or None

    def finish(self, *, counted: bool) -> list[str]:
        """No further gradient will come: take those of graphs that were retained, and refuse what
        is not whole. Returns what the user should know of this step's statistics. ``counted``: the
        number of samples is the one that was found here."""
        if self.backwards.running:
            self.backwards.outside()
        if self.backwards.failed:
            raise CaptureError(
                "A backward pass since the last step failed in the middle, and what it left in the "
                "gradients and statistics is still there: call optimizer.zero_grad() and "
                "kfac.discard() after such a failure, and do the batch again."
            )
        for hook in list(self.waiting):
            hook.finish()
        found = [this.doubt for this in self.passes if this.doubt and counted]
        if self.restarted:
            found.append(THROWN_AWAY)
        if self.second_order:
            found.append(SECOND_ORDER.format(self.second_order))
        return [*found, *self.axes.doubts]

    # What hooks do.
    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not in_backward():
            self.backwards.outside()
            if self.on_begin is not None:
                self.on_begin()
            self._before, self.inside = self.current, True
            given = (*args, *kwargs.values())
            listed = bool(given) and isinstance(given[0], list)
            self.current = Pass(sample_counts(given, self.batch_axis), listed=listed)
            if self.chooser is not None and self.armed and torch.is_grad_enabled():
                self.chooser.choose(self.current)

    def _end(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        this, self.inside = self.current, False
        if this is None:
            return
        if not torch.is_grad_enabled():
            if not in_backward():
                self.current = self._before  # an evaluation is no part of what comes
            return
        self._before = None
        self._cut.forget()
        if self.taping and this.tape and (main := prediction(out)) is not None:
            self.outputs[this] = get_gradient_edge(main), main.detach()
            main.register_hook(_OutputHook(self, this).predicts)
        for tensor in tensors_of(out):
            if tensor.requires_grad:
                tensor.register_hook(_OutputHook(self, this))

    def mark_returned(self, this: Pass) -> None:
        """A gradient came back to this pass, so its samples are part of the step."""
        self.backwards.arrived()
        if this.returned:
            return
        if self.passes and self.on_restart is not None and self.backwards.thrown_away():
            current = self.current
            self.on_restart()
            self.current = current
            self.restarted = True
        this.returned = True
        this.settle()
        self.passes.append(this)

    def watch_gradient(self, use: Use, x: Any, out: Tensor, view: View) -> None:
        """Put a hook on a layer's output; ``x`` is what the layer keeps of its input."""
        this, block = self.current, use[0]
        assert this is not None  # the call was counted
        x = self._cut.early(*use, x, this)
        this.hooked[block] += 1
        if self.taping:
            this.tape.append((use, x, get_gradient_edge(out), view))
        else:
            out.register_hook(_GradientHook(self, use, x, this, view))

    def count_call(self, block: Block, rows: int) -> bool:
        """Count a call on so many rows; returns whether its output needs a hook.

        Recomputing a checkpointed segment calls its layers again, inside the backward pass. If the
        first call had a graph the gradient will come to that one; if not (``use_reentrant=True``),
        it comes to this one.
        """
        this, again = self.current, in_backward()
        if this is None or not (again or self.inside or this.fits(rows)):
            self.backwards.outside()
            this = self.current = Pass()  # not the model itself, only a part of it
        if again:
            return this.hooked[block] < this.calls[block]
        this.calls[block] += 1
        if block.region_terms is None:
            this.seen[rows] += 1
        return True

    def facing(self, use: Use, x: Any) -> Use:
        """The use with its layer as the samples of ``x`` lie; matters for whole samples only."""
        this, (block, layer) = self.current, use
        if this is None or block.region_terms is not None:
            return use
        if not (block.structure.pooled or self.taping or this.chosen is not None):
            return use
        return block, self.axes.facing(layer, x, this.samples)


class _ProjectionHooks:
    """Watches the projections in a module that calls functions on its weights."""

    def __init__(self, capture: Capture, uses: list[Use]) -> None:
        self.capture = capture
        self.blocks = {layer: block for block, layer in uses if isinstance(layer, Projection)}
        self.entered: list[ExitStack] = []

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        while self.entered:  # a KeyboardInterrupt runs no hook, so the last call did not leave
            self.entered.pop().close()
        layers = list(self.blocks)
        watch = layers[0].watch(layers, self.seen, (*args, *kwargs.values()))
        self.entered.append(ExitStack())
        self.entered[-1].enter_context(watch)

    def leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if self.entered:  # not if another hook failed before the mode was entered
            self.entered.pop().close()

    def seen(self, layer: Projection[Any], x: Any, out: Tensor, view: View) -> None:
        capture, block = self.capture, self.blocks[layer]
        rows = len(x) if isinstance(x, Tensor) else x.count
        if capture.count_call(block, rows) and out.requires_grad and torch.is_grad_enabled():
            capture.watch_gradient((block, layer), x, out, view)


class _ForwardHook:
    """A layer's forward hook."""

    def __init__(self, capture: Capture, use: Use) -> None:
        self.capture, self.use = capture, use

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        capture, (block, layer) = self.capture, self.use
        x = args[0] if args else next(iter(kwargs.values()))
        if not capture.count_call(block, layer.count(x)):
            return
        if torch.is_grad_enabled() and out.requires_grad:
            use = capture.facing(self.use, x)
            capture.watch_gradient(use, use[1].keep(args, kwargs, out), out, use[1].arrange)


class _GradientHook:
    """The hook on an output tensor."""

    def __init__(self, capture: Capture, use: Use, x: Any, this: Pass, view: View) -> None:
        self.capture, self.use, self.x, self.this, self.view = capture, use, x, this, view
        self.kept: Tensor | None = None  # the gradients until now, of a graph that is retained

    def __call__(self, g: Tensor) -> None:
        if self.capture.root in observed:
            return
        if torch.is_grad_enabled():  # create_graph=True: the gradient of the loss comes later
            self.capture.skipped = True
            if g.requires_grad:
                g.register_hook(self.second_order)
            return
        g = self.view(g.detach())
        self.this.rows = max(self.this.rows, len(g))
        self.capture.mark_returned(self.this)
        self.kept = g if self.kept is None else self.kept + g
        if torch._C._autograd._get_current_graph_task_keep_graph():
            self.capture.waiting[self] = None
            return
        self.finish()
        self.x = None  # as autograd does, so that activations are freed on the way back

    def finish(self) -> None:
        g, self.kept = self.kept, None
        self.capture.waiting.pop(self, None)
        if g is not None:
            self.capture.on_pair(self.use, self.x, g, self.this)

    def second_order(self, g: Tensor) -> None:
        """The loss depends on this gradient."""
        if not torch.is_grad_enabled():
            layer = self.use[1]
            self.capture.second_order = f"{layer.kind} {layer.name!r}"


class _OutputHook:
    """The hook on the model's own output, before the backward pass goes on into the model."""

    def __init__(self, capture: Capture, this: Pass) -> None:
        self.capture, self.this = capture, this

    def __call__(self, g: Tensor) -> None:
        if not torch.is_grad_enabled() and self.capture.root not in observed:
            self.capture.mark_returned(self.this)
            self.capture.current = self.this  # what is recomputed from here on belongs to it

    def predicts(self, g: Tensor) -> None:  # on what the loss is computed from
        found = None if torch.is_grad_enabled() else self.capture.outputs.pop(self.this, None)
        if found is not None and self.this.tape and self.capture.on_output is not None:
            self.capture.on_output(self.this, *found)
