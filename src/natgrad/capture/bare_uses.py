"""Bare parameters: where samples come in, so that gradients of single samples come out.

Autograd adds up the samples where a parameter is broadcast over them: the gradient of ``p`` in
``x + p`` is the sum over the rows of ``x``. So on steps that update, the module that has the
parameter computes with a stand-in of it, a tensor that sees every function it enters:

    q = f(p)                    slices, look-ups, interpolation, exp, …: followed, nothing is done
    x + q, q * x, cat([q, x])   there q is expanded over the samples of x before it enters, which
                                changes no number of the result; the gradient [n, …] of what was
                                expanded is taken, and brought back through f, sample by sample

It is exact whatever the function does with ``x`` and ``q``, and whatever ``f`` is, since autograd
differentiates both. What matters is that a use is recognised. Samples are in front (or along the
``batch_axis`` that the user names), as everywhere. ``x`` carries them if it is what the module was
called with, or if the output of a layer is in its graph. Numbers that need no gradient may be a
mask as well as the features of a frozen network: what q makes with them is followed as *maybe* one
row a sample, until it meets something that carries samples, or a layer.

Two things keep a use that is not understood out of the statistics. One that the stand-in sees says
why (`natgrad.capture.refusals`). Those that it cannot see (another reference to the parameter, a
function outside of torch) are missing in the sum over samples, which is compared with the gradient
of the parameter (`natgrad.capture.accounts`). Either way the block drops this update, on all ranks.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from natgrad.capture.blocks import Block
from natgrad.capture.inner_uses import passes_over
from natgrad.capture.module_hooks import in_backward
from natgrad.capture.output_hooks import observed
from natgrad.capture.passes import tensors_of
from natgrad.capture.points import Point, Root
from natgrad.capture.stand_ins import stand_in
from natgrad.layers.bare import Bare

if TYPE_CHECKING:
    from natgrad.capture.hooks import Capture
    from natgrad.capture.tensor_hooks import Use


class BareHooks:
    """On the module that has the parameters: they are stand-ins while its forward runs."""

    def __init__(self, capture: "Capture", uses: list["Use"]) -> None:
        self.capture = capture
        self.uses = [(block, u) for block, u in uses if isinstance(u, Bare)]
        self.calls: list[BareCall] = []

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._clear()  # a KeyboardInterrupt runs no hook, so the last call did not leave
        if not torch.is_grad_enabled():
            return
        capture = self.capture
        call = BareCall(capture, (args, kwargs))
        self.calls.append(call)
        for block, layer in self.uses:
            parameter = module._parameters.get(layer.short)
            if parameter is None or parameter is not layer.weight:
                continue
            if capture.ignores:
                capture.account.leave_out(block)
                continue
            start = parameter.view_as(parameter)
            root = Root(call, (block, layer), start)
            module.__dict__[layer.short] = stand_in(start, [root])  # found before parameters are

    def leave(self, module: nn.Module, args: Any, out: Any) -> None:
        self._clear()

    def _clear(self) -> None:
        while self.calls:
            self.calls.pop().end()
        for _, layer in self.uses:
            layer.module.__dict__.pop(layer.short, None)


class BareCall:
    """One call of such a module. Stand-ins that leave it, as a table of relative positions does on
    its way to the attention, are followed until the model's forward ends."""

    def __init__(self, capture: "Capture", given: Any) -> None:
        self.capture, self.running, self.saving = capture, True, _saving()
        self.given = {storage_of(t) for t in tensors_of(given)} - {0}

    def end(self) -> None:
        self.running = False

    @property
    def alive(self) -> bool:
        if self.capture.ignores:
            return False
        return self.running or self.capture.inside or in_backward()

    @property
    def is_elsewhere(self) -> bool:
        return _saving() is not self.saving

    @property
    def samples(self) -> int:
        this = self.capture.current
        return (this.samples if this is not None else None) or 1

    @property
    def axis(self) -> int:
        return self.capture.batch_axis

    def carries(self, t: Tensor) -> bool:
        if isinstance(t, nn.Parameter) or t.ndim <= self.axis:
            return False
        if not t.requires_grad:
            given = t.shape[self.axis] % self.samples == 0 and t.shape[self.axis] >= self.samples
            return given and storage_of(t) in self.given
        if t.grad_fn is None or storage_of(t) in self.given:
            return True  # the input of a checkpoint, or of the module
        return any(_is_of_layer(node) for node in _nodes_behind(t.grad_fn))

    def take(self, root: Root, point: Point) -> None:
        capture, (block, _) = self.capture, root.use
        if passes_over(capture, root.use, point.expanded):
            return
        this, rows = capture.current, point.expanded.shape[point.axis]
        if this is not None and in_backward() and not this.again:
            # The forward pass of a checkpoint with use_reentrant=True had no graph, and no points.
            found = this.hooked[block] == this.recomputed[block]
            this.calls[block] += found
            if found and this.added[block]:
                self.refuse(root, "is used in several checkpoints with use_reentrant=True")
        samples = None if this is None else this.samples
        pull = PullBack(point, root.start, samples)
        point.expanded.register_hook(_Seen(capture, block, pull))
        if capture.count_call(block, rows):
            kept = point.expanded.new_empty(rows, 0)  # nothing of an input is needed
            capture.watch_gradient(root.use, kept, point.expanded, pull)

    def refuse(self, root: Root, why: str) -> None:
        self.capture.account.refuse(root.use[0], why)


def _saving() -> Any:
    """What packs tensors that autograd saves: something else in each checkpoint."""
    found = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if found is None else found[0]


def mark_output(out: Any) -> None:
    """A layer has made this tensor, so that what is computed of it carries samples."""
    node = out.grad_fn if isinstance(out, Tensor) else None
    if node is not None:
        kept: Any = node.metadata
        kept[_MARK] = True


_MARK = "natgrad: of a layer"


def _is_of_layer(node: Any) -> bool:
    if _MARK in node.metadata:
        return True
    leaf = getattr(node, "variable", None)
    return leaf is not None and not isinstance(leaf, nn.Parameter)


def storage_of(t: Tensor) -> int:
    """Where its numbers are; 0 for what has none of its own."""
    if torch._C._functorch.is_functorch_wrapped_tensor(t) or t.is_meta or t.is_sparse:
        return 0
    return t.untyped_storage().data_ptr()


def _nodes_behind(node: Any, limit: int = 20_000) -> Iterator[Any]:
    """The nodes of a graph, at most so many."""
    seen: set[Any] = set()
    left = [node]
    while left and len(seen) < limit:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        left += [below for below, _ in node.next_functions]


class PullBack:
    """The gradient of what was expanded -> ``[n, numel]`` of the parameter, for each sample.

    Its graph is still there: it is behind the tensor whose gradient has just come."""

    def __init__(self, point: Point, start: Tensor, samples: int | None) -> None:
        self.source, self.axis, self.start, self.samples = point.source, point.axis, start, samples
        self.is_shape = _only_shapes(point.source, start)

    def __call__(self, g: Tensor) -> Tensor:
        g = g.movedim(self.axis, 0)
        n, samples = len(g), self.samples
        if samples and n != samples and n % samples == 0:
            g = g.reshape(samples, n // samples, *g.shape[1:]).sum(1)
        g = g.reshape(len(g), *self.source.shape)
        numel = self.start.numel()
        if self.is_shape or not len(g):
            return g.reshape(len(g), numel) if self.is_shape else g.new_zeros(0, numel)
        try:
            return self._back(g, batched=True).reshape(len(g), numel)
        except RuntimeError:  # a function that vmap does not know
            return torch.stack([self._back(one, batched=False).flatten() for one in g])

    def total(self, g: Tensor) -> Tensor:
        """Of all samples together: ``[numel]``."""
        g = g.sum(self.axis, keepdim=True).reshape(self.source.shape)
        return (g if self.is_shape else self._back(g, batched=False)).flatten()

    def _back(self, g: Tensor, *, batched: bool) -> Tensor:
        (found,) = torch.autograd.grad(
            self.source, self.start, g, retain_graph=True, is_grads_batched=batched
        )
        return found


_SHAPES = {
    *("AliasBackward0", "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"),
    *("UnsqueezeBackward0", "SqueezeBackward0", "SqueezeBackward1"),
}


def _only_shapes(source: Tensor, start: Tensor) -> bool:
    """Whether a tensor has the entries of another one, in their order."""
    node = source.grad_fn
    while node is not None and node is not start.grad_fn:
        if node.name() not in _SHAPES:
            return False
        node = node.next_functions[0][0]
    return node is not None


class _Seen:
    """The hook on what was expanded."""

    def __init__(self, capture: "Capture", block: Block, pull: PullBack) -> None:
        self.capture, self.block, self.pull = capture, block, pull

    def __call__(self, g: Tensor) -> None:
        if not torch.is_grad_enabled() and self.capture.root not in observed:
            self.capture.account.of(self.block).add_seen(g.detach(), self.pull)
