"""Hooks: every layer's input with the gradient of its output, and no work between updates.

Curvature needs pairs ``(x, g)`` of the same call. A module's forward and backward hooks see calls,
but not which gradient belongs to which input. So a forward hook puts a hook on the output *tensor*,
and that hook holds the input: modules that are called twice, in-place activations, both kinds of
activation checkpointing, unused modules and evaluation passes all come out right.

- Samples are counted at the model, not at the layers: a layer may be called twice, or see windows
  or tokens as its batch. A pass counts once a gradient has come back to it; evaluation does not.
- A hook drops its input after use, as autograd does, unless the graph is retained. Otherwise all
  activations would be held until the end of the backward pass.
- Hooks are on the layers only on steps that update factors. On all others forward and backward
  call no function of natgrad, but for two hooks on the model where samples must be counted.
- Attention and recurrent layers call functions on their weights, which no module hook sees. A
  function mode watches them during their forward (`natgrad.layers.functional`).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.utils.rnn import PackedSequence

from natgrad.capture.blocks import Block
from natgrad.capture.module_hooks import Hooks, in_backward
from natgrad.layers import Layer
from natgrad.layers.functional import Projection

Use = tuple[Block, Layer[Any]]
View = Callable[[Tensor], Tensor]


class Pass:
    """One forward pass of the model, and which gradients of it have arrived."""

    def __init__(self, samples: int | None) -> None:
        self.samples = samples
        self.rows = 0  # the largest batch that a layer saw, if the samples were not counted
        self.returned = False
        self.calls: Counter[Block] = Counter()
        self.hooked: Counter[Block] = Counter()
        self.added: Counter[Block] = Counter()
        self.arrived: Counter[tuple[Block, int]] = Counter()
        self.pending: dict[tuple[Block, str, int], list[tuple[Tensor, ...]]] = {}
        self.tape: list[tuple[Use, Any, GradientEdge, View]] = []


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
    ) -> None:
        self.root, self.on_pair, self.taping, self.batch_axis = root, on_pair, taping, batch_axis
        self.uses: list[Use] = [(block, layer) for block in blocks for layer in block.layers]
        self.on_begin: Callable[[], None] | None = None  # before a forward pass that is watched
        self.current: Pass | None = None
        self.passes: list[Pass] = []
        self.skipped = False  # a backward pass built a graph, so its gradients were not taken
        self._layer_hooks, self._root_hooks = Hooks(), Hooks()

    # Hooks come and go.

    @property
    def armed(self) -> bool:
        return bool(self._layer_hooks)

    def watch(self, *, layers: bool, samples: bool) -> None:
        """Have hooks on every layer, or none; and on the model itself, to count samples."""
        if layers:
            self.arm()
        elif self._layer_hooks:
            self.disarm()
        if samples != bool(self._root_hooks):
            self.count_samples(samples)

    def count_samples(self, wanted: bool) -> None:
        """Two hooks on the model itself."""
        if wanted and not self._root_hooks:
            add, root = self._root_hooks.add, self.root
            add(root.register_forward_pre_hook, self._begin, with_kwargs=True)
            add(root.register_forward_hook, self._end)
        elif not wanted:
            self._root_hooks.remove()

    def arm(self) -> None:
        """Hooks on every layer."""
        if self._layer_hooks:
            return
        watched: dict[nn.Module, list[Use]] = {}
        for use in self.uses:
            watched.setdefault(use[1].module, []).append(use)
        add = self._layer_hooks.add
        for module, uses in watched.items():
            if isinstance(uses[0][1], Projection):
                watch = _ProjectionHooks(self, uses)
                add(module.register_forward_pre_hook, watch.enter, with_kwargs=True)
                # Also after an exception, or the mode would stay on for the rest of the program.
                add(module.register_forward_hook, watch.leave, always_call=True)
                continue
            for use in uses:
                hook = _ForwardHook(self, use)
                add(module.register_forward_hook, hook, prepend=True, with_kwargs=True)

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
        self.current, self.passes, self.skipped = None, [], False

    def samples(self) -> int | None:
        """The number of samples in all passes since the last step; ``None`` if it is unknown."""
        counts = [p.rows if p.samples is None else p.samples for p in self.passes]
        return sum(counts) or None

    # What hooks do.

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not in_backward():
            if self.on_begin is not None:
                self.on_begin()
            self.current = Pass(leading_size((*args, *kwargs.values()), self.batch_axis))

    def _end(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        this = self.current
        if this is None or not torch.is_grad_enabled():
            return
        for tensor in tensors_of(out):
            if tensor.requires_grad:
                tensor.register_hook(_OutputHook(self, this))

    def mark_returned(self, this: Pass) -> None:
        """A gradient came back to this pass, so its samples are part of the step."""
        if not this.returned:
            this.returned = True
            self.passes.append(this)

    def watch_gradient(self, use: Use, x: Any, out: Tensor, view: View) -> None:
        """Put a hook on a layer's output; ``x`` is what the layer keeps of its input."""
        this, block = self._pass(), use[0]
        this.hooked[block] += 1
        if self.taping:
            this.tape.append((use, x, get_gradient_edge(out), view))
        else:
            out.register_hook(_GradientHook(self, use, x, this, view))

    def count_call(self, block: Block) -> bool:
        """Count a call; returns whether its output needs a hook.

        Recomputing a checkpointed segment calls its layers again, inside the backward pass. If the
        first call had a graph the gradient will come to that one; if not (``use_reentrant=True``),
        it comes to this one.
        """
        this = self._pass()
        if in_backward():
            return this.hooked[block] < this.calls[block]
        this.calls[block] += 1
        return True

    def _pass(self) -> Pass:
        if self.current is None:  # the model itself was not called, only a part of it
            self.current = Pass(None)
        return self.current


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
        if capture.count_call(block) and out.requires_grad and torch.is_grad_enabled():
            capture.watch_gradient((block, layer), x, out, view)


class _ForwardHook:
    """A layer's forward hook."""

    def __init__(self, capture: Capture, use: Use) -> None:
        self.capture, self.use = capture, use

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        capture, (block, layer) = self.capture, self.use
        if capture.count_call(block) and torch.is_grad_enabled() and out.requires_grad:
            capture.watch_gradient(self.use, layer.keep(args, kwargs, out), out, layer.arrange)


class _GradientHook:
    """The hook on an output tensor."""

    def __init__(self, capture: Capture, use: Use, x: Any, this: Pass, view: View) -> None:
        self.capture, self.use, self.x, self.this, self.view = capture, use, x, this, view

    def __call__(self, g: Tensor) -> None:
        if torch.is_grad_enabled():  # create_graph=True: the gradient of the loss comes later
            self.capture.skipped = True
            return
        g = self.view(g.detach())
        self.this.rows = max(self.this.rows, len(g))
        self.capture.mark_returned(self.this)
        self.capture.on_pair(self.use, self.x, g, self.this)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self.x = None  # as autograd does, so that activations are freed on the way back


class _OutputHook:
    """The hook on the model's own output."""

    def __init__(self, capture: Capture, this: Pass) -> None:
        self.capture, self.this = capture, this

    def __call__(self, g: Tensor) -> None:
        if not torch.is_grad_enabled():
            self.capture.mark_returned(self.this)
            self.capture.current = self.this  # what is recomputed from here on belongs to it


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_of(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))


def leading_size(values: tuple[Any, ...], axis: int) -> int | None:
    """The number of samples in what a model was called with: the leading size of its first tensor,
    or the length of a list (of images of different sizes)."""
    for value in values:
        if isinstance(value, list):
            return len(value)
        if isinstance(value, PackedSequence):
            return int(value.batch_sizes[0])
        for tensor in tensors_of(value):
            if tensor.ndim > axis:
                return tensor.shape[axis]
    return None
