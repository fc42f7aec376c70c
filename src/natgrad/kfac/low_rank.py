"""Gradients of wide linear layers as a product of two thin matrices, ``grad = g^T a``.

    (G^-1 g^T) (a A^-1)    instead of    G^-1 (g^T a) A^-1,      g [k, rows], a [k, cols]

With fewer rows ``k`` in the batch than the layer is wide it is cheaper to precondition ``g`` and
``a`` than their product, and just as exact. It needs an inverse that damps each factor, since a
damping of the whole block does not split, and the gradient must still be this product: not clipped,
not added to. That is checked with a random vector, ``grad v = g^T (a v)``, before it is used.
"""

from typing import Any

import torch
from torch import Tensor, nn

from natgrad.capture.blocks import Block
from natgrad.capture.module_hooks import Hooks, in_backward
from natgrad.comm.layouts import is_sharded
from natgrad.layers.linear import Linear
from natgrad.structures import Kronecker

# Smaller layers are bound by overhead, not by products.
_WIDE = 1 << 17
_WITH_KWARGS = {"with_kwargs": True}


class LowRankGradients:
    """Keeps input and output gradient of each candidate from its forward to the next step."""

    def __init__(self, blocks: list[Block], enabled: bool) -> None:
        self._pairs: dict[Block, tuple[Tensor, Tensor] | None] = {}
        self._probes: dict[Block, Tensor] = {}
        self._hooks = Hooks()
        self._hooks.add(
            (block.layers[0].module.register_forward_hook, _KeepPair(self, block), _WITH_KWARGS)
            for block in (blocks if enabled else [])
            if _candidate(block)
        )

    @property
    def found(self) -> bool:
        """Whether any layer has such a gradient since the last step."""
        return bool(self._pairs)

    def forget(self) -> None:
        self._pairs.clear()

    def detach(self) -> None:
        self._hooks.remove()
        self.forget()

    def keep(self, block: Block, a: Tensor, g: Tensor) -> None:
        # A sum of several products is no thin one, and holding them would fill the memory.
        self._pairs[block] = None if block in self._pairs else (a, g)

    def take(self, block: Block, loss_scale: float) -> "OuterProduct | None":
        """The preconditioned gradient, if ``g^T a`` is the one in ``.grad``."""
        pair = self._pairs.get(block)
        if pair is None or not block.ready:
            return None
        layer = block.layers[0]
        (a, g), weight, bias = pair, layer.weight, layer.bias
        if weight is None or weight.grad is None or g.dtype != weight.dtype or a.dtype != g.dtype:
            return None
        if loss_scale != 1.0:
            g = g / loss_scale
        probe = self._probe(block, a)
        tolerance = 100 * torch.finfo(g.dtype).eps
        if not _close(weight.grad @ probe, g.mT @ (a @ probe), tolerance):
            return None
        if bias is not None and (bias.grad is None or not _close(bias.grad, g.sum(0), tolerance)):
            return None
        return OuterProduct(block, g, a)

    def _probe(self, block: Block, a: Tensor) -> Tensor:
        if block not in self._probes:
            generator = torch.Generator().manual_seed(len(self._probes))
            self._probes[block] = torch.randn(a.shape[1], generator=generator).to(a)
        return self._probes[block]


class _KeepPair:
    """The forward hook of a candidate."""

    def __init__(self, low_rank: LowRankGradients, block: Block) -> None:
        self.low_rank, self.block = low_rank, block

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, out: Tensor) -> None:
        x: Tensor = args[0] if args else kwargs["input"]
        if not (torch.is_grad_enabled() and out.requires_grad) or in_backward():
            return
        if not _pays(x.numel() // max(1, x.shape[-1]), self.block):
            return
        a = x.detach().reshape(-1, x.shape[-1])

        def arrived(g: Tensor) -> None:
            self.low_rank.keep(self.block, a, g.detach().reshape(-1, g.shape[-1]))

        out.register_hook(arrived)


class OuterProduct:
    """A preconditioned gradient ``left^T right``, not multiplied out before its scale is known."""

    def __init__(self, block: Block, g: Tensor, a: Tensor) -> None:
        found = block.decomposed().outer(g, a)
        assert found is not None
        self.block, self.g, self.a = block, g, a
        self.left, self.right = found

    def dot(self, weight_rate: float, bias_rate: float) -> Tensor:
        """``|reach^2 <preconditioned, raw>|``, by ``k x k`` matrices: ``<l g^T, r a^T>``."""
        cols, over_g = self.a.shape[1], self.left @ self.g.mT
        total = weight_rate**2 * torch.sum(over_g * (self.right[:, :cols] @ self.a.mT))
        if cols < self.right.shape[1]:
            total += bias_rate**2 * torch.sum(over_g * self.right[:, cols:])
        return total.abs()

    def write(self, scale: float) -> None:
        """Replace the gradients."""
        layer, left = self.block.layers[0], self.left.mul_(scale).mT
        cols = layer.weight_cols
        assert layer.weight is not None
        torch.mm(left, self.right[:, :cols], out=layer.weight.grad)
        if layer.bias is not None:
            torch.mv(left, self.right[:, cols], out=layer.bias.grad)


def _candidate(block: Block) -> bool:
    layer = block.layers[0]
    return (
        len(block.layers) == 1
        and type(layer) is Linear
        and layer.call is None  # what the module is called with is not what meets the weight
        and layer.weight is not None
        and not is_sharded(layer.weight)
        and isinstance(block.structure, Kronecker)
        and block.inverse.damps_factors  # a damping of the whole block needs the product
        and block.device.type == "cpu"  # the check would make an accelerator wait
        and block.shape[1] * block.shape[2] >= _WIDE
    )


def _pays(k: int, block: Block) -> bool:
    _, rows, cols = block.shape
    # Columns that meet in a product: all of a side, those of a block, or one of a diagonal.
    own = {name: 1 if form.diagonal else form.spec.dim for name, form in block.forms.items()}
    g, a = own["G"], own["A"]
    thin = k * (rows * g + cols * a + rows * cols)
    return thin < 0.9 * rows * cols * (g + a)


def _close(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((actual - expected).norm() <= tolerance * expected.norm())
