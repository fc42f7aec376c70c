"""Losses that differentiate the network: uses of a weight inside of gradients, found as they arise.

``torch.autograd.grad(u, x, create_graph=True)`` makes the backward pass a part of the loss's graph,
and that pass multiplies by every weight again (`natgrad.layers.inner`). A hook on a layer's output
sees such a pass, since gradients are being recorded in it. The node of the layer's product is then
asked, once, for what comes out of it: that is the output of a further use, and gets a hook like any
other. If it is differentiated in turn, so is what comes out of it, to any order.

Where no further use can be made of it (layers other than ``nn.Linear``, structures that do not take
whole gradients, gradients of parameters) a hook on it tells whether the loss depends on it. If so,
the step is refused, as the curvature would be that of another loss. A gradient that is only looked
at, such as a Hessian for a plot, is no part of the loss and stops nobody.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from natgrad.capture.backwards import by_hand, reaches
from natgrad.capture.blocks import Block
from natgrad.capture.output_hooks import observed
from natgrad.layers.base import SharedInput
from natgrad.layers.inner import next_use

if TYPE_CHECKING:
    from natgrad.capture.hooks import Capture
    from natgrad.capture.passes import Pass
    from natgrad.capture.tensor_hooks import Use

_UNWATCHED = (
    "or compute that part of the loss inside of 'with kfac.unwatched():', which leaves it out of "
    "the curvature."
)
_BY_LAYER = (
    "The loss depends on gradients that go through {layer} (create_graph=True), and KFAC can count "
    "those of nn.Linear with a plain weight alone (not sharded): leave the layer out with "
    "exclude=[{name!r}], "
) + _UNWATCHED
_BY_STRUCTURE = (
    "The loss depends on gradients that go through {layer} (create_graph=True), for which "
    "{structure!r} has no place: pass structure=natgrad.Kronecker(sharing='traces'); or, if the "
    "loss is one of squared residuals, curvature=natgrad.curvature.GaussNewton(), and take the "
    "loss from kfac.residuals(...); "
) + _UNWATCHED
_BY_PARAMETER = (
    "The loss depends on gradients of the parameters of {layer} (create_graph=True, as in MAML or "
    "a penalty on their norm), which are sums over samples, so that no sample has a gradient of "
    "its own: take a gradient of first order there, "
) + _UNWATCHED
_BY_TRANSFORM = (
    "The loss depends on {layer} through torch.func or forward-mode derivatives (vmap, grad, jvp, "
    "dual numbers), where KFAC sees no gradients: call the model itself, with "
    "torch.autograd.grad(..., create_graph=True) for derivatives, "
) + _UNWATCHED

_BY_OTHER_WEIGHTS = (
    "The loss depends on {layer} by weights that were computed from its own and are in their place "
    "meanwhile (torch.func.functional_call), where KFAC does not see the gradients of its own: "
    "call the model itself, "
) + _UNWATCHED

# Nodes between a layer's output and its product, which change the shape alone.
_SHAPES = {
    f"{name}Backward0"
    for name in ("View", "UnsafeView", "ReshapeAlias", "T", "Transpose", "Permute", "Unsqueeze")
} | {"SqueezeBackward0", "SqueezeBackward1", "ToCopyBackward0"}
_PRODUCTS = {"MmBackward0": 0, "AddmmBackward0": 1}  # where their two matrices begin


class Product(NamedTuple):
    """A node that multiplies by the weight. ``operand``: the number of the other matrix among its
    inputs; ``left``: the weight stands on its left, so that samples are columns."""

    node: Any
    operand: int
    left: bool


class InSamples:
    """A matrix ``[n, d]`` beside a weight -> the layer's own axes, samples in front.

    ``lead``: the sizes of the layer's tensors before their features."""

    def __init__(self, layer: SharedInput[Any], lead: Sequence[int], *, left: bool) -> None:
        self.layer, self.lead, self.left = layer, tuple(lead), left

    def __call__(self, t: Tensor) -> Tensor:
        t = t.mT if self.left else t
        return self.layer.samples_first(t.reshape(*self.lead, t.shape[-1]), 1)


def follow(capture: "Capture", use: "Use", this: "Pass", g: Tensor, view: Any) -> None:
    """A backward pass that is recorded has come to the output of a use; ``g`` is its gradient."""
    if capture.ignores:
        return
    block, layer = use
    if isinstance(layer, SharedInput) and layer.weight is None:
        return  # a bias is in no product
    node = torch._C._current_autograd_node()
    product, target = None, _below(node)
    inner = next_use(layer) if isinstance(layer, SharedInput) else None
    if inner is not None and layer.weight is not None:
        product = _product(node, layer.weight)
        target = node if product is None else product.node
    lead = view.lead if isinstance(view, InSamples) else g.shape[:-1]
    words = {"layer": f"{layer.kind} {layer.name!r}", "name": layer.name}
    refusal = Refusal(capture, block, _BY_LAYER.format(**words))
    if inner is not None and not block.structure.whole:
        product, inner = None, None
        sentence = _BY_STRUCTURE.format(**words, structure=block.structure)
        refusal = Refusal(capture, block, sentence)
    of_parameters = Refusal(capture, block, _BY_PARAMETER.format(**words), first=True)
    own = {id(p) for p in block.parameters}
    _Outgoing(target, capture, (block, inner), this, lead, product, (refusal, of_parameters), own)


class _Outgoing:
    """The hook on a node, for one pass: what comes out of it."""

    def __init__(
        self,
        node: Any,
        capture: "Capture",
        use: tuple[Block, Any],
        this: "Pass",
        lead: Sequence[int],
        product: Product | None,
        refusals: tuple["Refusal", "Refusal"],
        own: set[int],
    ) -> None:
        self.capture, self.use, self.this, self.lead = capture, use, this, lead
        self.operand = None if product is None else product.operand
        self.left = product is not None and product.left
        self.refusals = refusals
        self.of_weights = {i for i, (n, _) in enumerate(node.next_functions) if _is_of(n, own)}
        self.task = torch._C._current_graph_task_id()
        self.handle = node.register_hook(self)

    def __call__(
        self, outgoing: Sequence[Tensor | None], incoming: Sequence[Tensor | None]
    ) -> None:
        self.handle.remove()
        if torch._C._current_graph_task_id() != self.task:
            return  # the pass that it was for has ended before this node
        for number, p in enumerate(outgoing):
            if p is None or not p.requires_grad:
                continue
            if number != self.operand:
                p.register_hook(self.refusals[number in self.of_weights])
            elif (q := incoming[0]) is not None:
                block, layer = self.use
                view = InSamples(layer, self.lead, left=self.left)
                self.capture.watch_inner((block, layer), view(q.detach()), p, view, self.this)


class Refusal:
    """The hook on a gradient that the loss must not depend on."""

    def __init__(
        self, capture: "Capture", block: Block, sentence: str, *, first: bool = False
    ) -> None:
        self.capture, self.block, self.sentence = capture, block, sentence
        self.first = first  # it goes before what others have to say

    def __call__(self, g: Tensor) -> None:
        capture = self.capture
        if capture.root in observed:
            return
        if torch.is_grad_enabled():  # differentiated once more: what comes of it is refused, too
            node = torch._C._current_autograd_node()
            if node is not None and not capture.ignores:
                none = (self.block, None)
                _Outgoing(node, capture, none, None, (), None, (self, self), set())  # type: ignore[arg-type]
        elif reaches(self.block.parameters):
            if by_hand(self.block.parameters):  # a product with a Hessian, which is no gradient
                capture.aside = torch._C._current_graph_task_id()
            else:
                known = "" if self.first else capture.second_order
                capture.second_order = known or self.sentence


def passes_over(capture: "Capture", use: "Use", out: Tensor) -> bool:
    """Whether a layer's call is none of the statistics', or its result can have no hook: inside of
    a transform of torch.func. Nor is one with other weights than its own, as of a teacher."""
    if capture.ignores:
        return True
    if lends(use[1].module):
        _refuse_other_weights(capture, use, out)
        return True
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(out)
    transformed = bool(wrapped) or forward_ad._current_level >= 0
    return transformed and _refuse_transformed(capture, use, out)


def lends(module: nn.Module) -> bool:
    """Whether other tensors are in the place of its parameters for the time of a call."""
    own = module._parameters.values()
    return any(p is not None and not isinstance(p, nn.Parameter) for p in own)


def _refuse_other_weights(capture: "Capture", use: "Use", out: Any) -> None:
    block, layer = use
    if isinstance(out, Tensor) and out.requires_grad:
        sentence = _BY_OTHER_WEIGHTS.format(layer=f"{layer.kind} {layer.name!r}")
        out.register_hook(Refusal(capture, block, sentence))


def _refuse_transformed(capture: "Capture", use: "Use", out: Tensor) -> bool:
    """Have the loss refused if it depends on such a result, or on its tangent. Returns whether no
    other hook can be put on it."""
    wrapped, base = False, out
    while torch._C._functorch.is_functorch_wrapped_tensor(base):
        wrapped, base = True, torch._C._functorch.get_unwrapped(base)
    found = [base] if wrapped else []
    if forward_ad._current_level >= 0:
        found.append(forward_ad.unpack_dual(base).tangent)
    block, layer = use
    refusal = Refusal(capture, block, _BY_TRANSFORM.format(layer=f"{layer.kind} {layer.name!r}"))
    for tensor in found:
        if capture.follows and tensor is not None and tensor.requires_grad:
            tensor.register_hook(refusal)
    return wrapped


def _product(node: Any, weight: nn.Parameter) -> Product | None:
    """The product with this weight that a node is, or that it only reshapes."""
    node = _below(node)
    first = _PRODUCTS.get(node.name())
    if first is None:
        return None
    left, right = (edge[0] for edge in node.next_functions[first : first + 2])
    if _is_of(right, {id(weight)}):
        return Product(node, first, left=False)
    if _is_of(left, {id(weight)}):
        return Product(node, first + 1, left=True)
    return None


def _below(node: Any) -> Any:
    """The first node that does more than change the shape."""
    while node.name() in _SHAPES and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    return node


def _is_of(node: Any, parameters: set[int]) -> bool:
    """Whether a node only reshapes one of these parameters."""
    if node is None:
        return False
    return id(getattr(_below(node), "variable", None)) in parameters
