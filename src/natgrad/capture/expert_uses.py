"""Experts in one parameter: a function mode that sees where their matrices meet rows.

While the forward of the module that has them runs, every function of torch that takes a view of
the parameter, or a copy, is looked at (`natgrad.capture.expert_views`):

    gives a view, or nothing with a gradient    nothing is done
    gives a copy                                its views are looked at, too
    multiplies rows                             a use: each expert that sees rows gets them, with
                                                the gradient of its part of the result
    anything else                               a use that is not understood

What a use is (`natgrad.capture.expert_products`) is the same for a loop over experts, for gathered
matrices and for a grouped product, so that a model's choice among them changes no number. Biases
are not followed: each is taken to be added to all rows that its expert sees.

Uses that are not understood, or not seen at all, are missing in the sum over rows, which is
compared with the gradient of the parameter (`natgrad.capture.accounts`); so are biases used in
another way. All blocks of the parameter then drop this update, on all ranks.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from natgrad.capture.accounts import StackEntry
from natgrad.capture.backwards import reaches
from natgrad.capture.bare_uses import BareHooks, mark_output, storage_of
from natgrad.capture.blocks import Block
from natgrad.capture.expert_products import Arrange, Product, Views, copied, multiplied
from natgrad.capture.expert_views import Matrices, read
from natgrad.capture.inner_uses import passes_over
from natgrad.capture.output_hooks import observed
from natgrad.capture.passes import tensors_of
from natgrad.comm.layouts import is_sharded
from natgrad.layers.bare import Bare
from natgrad.layers.experts import Expert

if TYPE_CHECKING:
    from natgrad.capture.hooks import Capture
    from natgrad.capture.tensor_hooks import Use


class Experts:
    """Of one parameter: its blocks, by the numbers of experts."""

    def __init__(self, capture: "Capture", uses: Sequence[tuple[Block, Expert]]) -> None:
        self.capture, layer = capture, uses[0][1]
        self.short, self.parameter, self.bias = layer.short, layer.stack, layer.stack_bias
        self.order = "io" if layer.inputs_first else "oi"
        self.uses: dict[int, list[tuple[Block, Expert]]] = {}
        for block, one in uses:
            self.uses.setdefault(one.index, []).append((block, one))
        self.blocks = [block for block, _ in uses]

    @property
    def entry(self) -> StackEntry:
        axis = 1 + self.order.index("o")
        return self.capture.account.stack(self.parameter, self.blocks, rows_axis=axis)

    @property
    def bias_entry(self) -> StackEntry:
        assert self.bias is not None
        return self.capture.account.stack(self.bias, self.blocks, rows_axis=1)


class ExpertHooks(TorchFunctionMode):
    """A function mode that is on while a module's forward runs."""

    def __init__(self, capture: "Capture", uses: list["Use"]) -> None:
        super().__init__()
        self.capture = capture
        by_name: dict[str, list[tuple[Block, Expert]]] = {}
        for block, layer in uses:
            if isinstance(layer, Expert):
                by_name.setdefault(layer.short, []).append((block, layer))
        self.experts = [Experts(capture, own) for own in by_name.values()]
        others = any(isinstance(layer, Bare) for _, layer in uses)
        self.bare = BareHooks(capture, uses) if others else None
        self.entered: list[ExitStack] = []
        self.held: dict[int, list[Matrices]] = {}  # by storage

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        while self.entered:  # a KeyboardInterrupt runs no hook, so the last call did not leave
            self.entered.pop().close()
        if self.bare is not None:
            self.bare.enter(module, args, kwargs)
        self.held = {}
        for experts in self.experts:
            self._begin(module, experts)
        self.entered.append(ExitStack())
        self.entered[-1].enter_context(self)

    def leave(self, module: nn.Module, args: Any, out: Any) -> None:
        if self.entered:  # not if another hook failed before the mode was entered
            self.entered.pop().close()
        self.held = {}
        if self.bare is not None:
            self.bare.leave(module, args, out)

    def _begin(self, module: nn.Module, experts: Experts) -> None:
        # FSDP has another tensor there meanwhile than the layer's own.
        current = module._parameters.get(experts.short)
        if current is None:
            return
        trained = torch.is_grad_enabled()
        if not _is_plain(current):
            why = "is in shards, as of tensor or expert parallelism"
            if not is_sharded(current):
                why = f"is a {type(current).__name__}"
            self._refuse(experts, why)
            return
        ids = torch.arange(current.shape[0], device=current.device)
        rows = range(current.shape[1 + experts.order.index("o")])
        self._hold(Matrices(current, experts.order, ids, rows, experts))
        if not (trained and isinstance(current, nn.Parameter)):
            return
        account, entries = self.capture.account, [(current, "entry")]
        if experts.bias is not None:
            bias = module._parameters.get(f"{experts.short}_bias")
            entries += [] if bias is None else [(bias, "bias_entry")]
        for tensor, name in entries:
            if self.capture.ignores:
                getattr(experts, name).leave_out()
            else:
                account.watch_stack(self.capture, tensor, partial(getattr, experts, name))

    def _hold(self, matrices: Matrices) -> None:
        self.held.setdefault(storage_of(matrices.tensor), []).append(matrices)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        found = [
            (t, matrices)
            for t in (*tensors_of(args), *tensors_of(kwargs))
            for matrices in self._of(t)
        ]
        if found:
            self._seen(getattr(func, "__name__", repr(func)), args, kwargs, found, out)
        return out

    def _of(self, t: Tensor) -> list[Matrices]:
        """What a tensor is a view of: one at most."""
        if not _is_plain(t):
            return []
        return [one for one in self.held.get(storage_of(t), []) if one.holds(t)][:1]

    def _seen(
        self, name: str, args: Any, kwargs: Any, found: list[tuple[Tensor, Matrices]], out: Any
    ) -> None:
        experts: Experts = found[0][1].source
        results = [t for t in tensors_of(out) if t.is_floating_point() and not self._of(t)]
        # What has no gradient is a copy of frozen matrices, if it is anything.
        counts = any(t.requires_grad for t in results) or not torch.is_grad_enabled()
        if not results or not (counts or not experts.parameter.requires_grad):
            return
        views: Views = {}
        for t, matrices in found:
            if (view := read(t, matrices)) is None:
                if not counts:
                    return
                self._refuse(experts, f"enters {name}() in a shape that is not understood")
                return
            views[id(t)] = view
        product = multiplied(name, args, kwargs, views) if counts else None
        if isinstance(product, Product):
            self._use(experts, product, results[0])
            return
        if product is None and len(found) == 1 and len(results) == 1:
            made = copied(name, args, kwargs, next(iter(views.values())), results[0])
            if made is not None:
                self._hold(made)
                return
        if counts:
            self._refuse(experts, product or f"enters {name}()")

    def _refuse(self, experts: Experts, why: str) -> None:
        if torch.is_grad_enabled() and not self.capture.ignores:
            experts.entry.refuse(why)

    def _use(self, experts: Experts, product: Product, out: Tensor) -> None:
        capture, watched = self.capture, False
        mark_output(out)
        first = experts.uses[min(experts.uses)][0]
        if passes_over(capture, first, out):
            return
        for expert, a, arrange in product.by_expert(experts.parameter.shape[0]):
            for use in experts.uses.get(expert, []):
                part = _own_part(use[1], product.rows)
                if isinstance(part, str):
                    self._refuse(experts, part)
                    return
                if part is None or not capture.count_call(use[0], 0):
                    continue
                if torch.is_grad_enabled() and out.requires_grad:
                    watched = True
                    capture.watch_gradient(use, a, out, _View(use[1], arrange, part))
        if watched:
            out.register_hook(_SeenRows(capture, experts, product))


def _is_plain(t: Tensor) -> bool:
    """Whether a tensor's numbers lie where its storage says, as those of other classes need not."""
    return type(t) is Tensor or type(t) is nn.Parameter


def _own_part(layer: Expert, rows: range) -> list[int] | bool | str | None:
    """Which of the rows that were multiplied by are a layer's: True for those that it would take
    itself, ``None`` if there are none of them."""
    if len(rows) == layer.rows_of_expert and rows.step == 1:
        return True
    own = [k for k, row in enumerate(rows) if row in layer.own_rows]
    if own and len(own) < layer.rows:
        return "is multiplied in parts of its rows"
    return own or None


class _View:
    """The gradient of a function's result -> that of a layer's rows ``[n, rows]``."""

    def __init__(self, layer: Expert, arrange: Arrange, part: list[int] | bool) -> None:
        self.layer, self.arrange, self.part = layer, arrange, part

    def __call__(self, g: Tensor) -> Tensor:
        g = self.arrange(g)
        return self.layer.of_all_rows(g) if self.part is True else g[:, self.part]


class _SeenRows:
    """The hook on a product, for the account."""

    def __init__(self, capture: "Capture", experts: Experts, product: Product) -> None:
        self.capture, self.experts, self.product = capture, experts, product

    def __call__(self, g: Tensor) -> None:
        experts, product = self.experts, self.product
        if torch.is_grad_enabled() or self.capture.root in observed:
            return
        if not reaches(experts.blocks[0].parameters):
            return
        g = product.arrange(g.detach())
        if experts.parameter.requires_grad:
            experts.entry.add_seen(product.ids, product.rows, g, product.a)
        if experts.bias is not None and experts.bias.requires_grad:
            experts.bias_entry.add_seen(product.ids, product.rows, g, None)
