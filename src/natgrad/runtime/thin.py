"""Gradients of wide linear layers as a product of two thin matrices, ``grad = g^T a``.

With fewer rows in the batch than the layer is wide it is cheaper to precondition ``g`` and ``a``
than their product, and just as exact. That the gradient still is this product (not clipped, not
added to) is checked with a random vector before it is used.
"""

from typing import Any

import torch
from torch import Tensor, nn

from natgrad.layers.linear import Linear
from natgrad.runtime.blocks import Block
from natgrad.runtime.hooks import Hook, in_backward, remove
from natgrad.structures import Kronecker

# Smaller layers are bound by overhead, not by products.
_WIDE = 1 << 17


class ThinGradients:
    """Keeps input and output gradient of each candidate from its forward to the next step."""

    def __init__(self, blocks: list[Block], enabled: bool) -> None:
        self._pairs: dict[Block, tuple[Tensor, Tensor] | None] = {}
        self._probes: dict[Block, Tensor] = {}
        self._handles = [
            block.layers[0].module.register_forward_hook(Hook(_Call(self, block)), with_kwargs=True)
            for block in (blocks if enabled else [])
            if _candidate(block)
        ]

    def forget(self) -> None:
        self._pairs.clear()

    def detach(self) -> None:
        remove(self._handles)
        self.forget()

    def keep(self, block: Block, a: Tensor, g: Tensor) -> None:
        # A sum of several products is no thin one, and holding them would fill the memory.
        self._pairs[block] = None if block in self._pairs else (a, g)

    def take(self, block: Block, loss_scale: float) -> tuple[Tensor, Tensor] | None:
        """``g [k, rows]`` and ``a [k, cols]`` if ``g^T a`` is the gradient in ``.grad``."""
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
        if bias is not None:
            if bias.grad is None or not _close(bias.grad, g.sum(0), tolerance):
                return None
            a = torch.cat([a, a.new_ones(len(a), 1)], 1)
        return g, a

    def _probe(self, block: Block, a: Tensor) -> Tensor:
        if block not in self._probes:
            generator = torch.Generator().manual_seed(len(self._probes))
            self._probes[block] = torch.randn(a.shape[1], generator=generator).to(a)
        return self._probes[block]


class _Call:
    """The forward hook of a candidate."""

    def __init__(self, thin: ThinGradients, block: Block) -> None:
        self.thin, self.block = thin, block

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, out: Tensor) -> None:
        x: Tensor = args[0] if args else kwargs["input"]
        if not (torch.is_grad_enabled() and out.requires_grad) or in_backward():
            return
        if not _pays(x.numel() // max(1, x.shape[-1]), self.block):
            return
        a = x.detach().reshape(-1, x.shape[-1])

        def arrived(g: Tensor) -> None:
            self.thin.keep(self.block, a, g.detach().reshape(-1, g.shape[-1]))

        out.register_hook(arrived)


def precondition_outer(block: Block, g: Tensor, a: Tensor, rates: tuple[float, float]) -> Tensor:
    """Write the preconditioned gradient of ``g^T a``; returns ``lr^2 <preconditioned, raw>``.

    The inner product is one of ``k x k`` matrices: ``<l^T r, g^T a> = <l g^T, r a^T>``.
    """
    structure, layer = block.structure, block.layers[0]
    assert isinstance(structure, Kronecker)
    left, right = structure.precondition_outer(block.parts, g, a)
    cols = layer.weight_cols
    assert layer.weight is not None
    torch.mm(left.mT, right[:, :cols], out=layer.weight.grad)
    over_g = left @ g.mT
    total = rates[0] ** 2 * torch.sum(over_g * (right[:, :cols] @ a[:, :cols].mT))
    if layer.bias is not None and layer.bias.grad is not None:
        torch.mv(left.mT, right[:, cols], out=layer.bias.grad)
        total += rates[1] ** 2 * torch.sum(over_g * right[:, cols:])
    return total


def _candidate(block: Block) -> bool:
    layer = block.layers[0]
    return (
        len(block.layers) == 1
        and type(layer) is Linear
        and layer.weight is not None
        and isinstance(block.structure, Kronecker)
        and not block.inverse.joint  # a joint damping needs the product
        and block.device.type == "cpu"  # the check would make an accelerator wait
        and block.shape[1] * block.shape[2] >= _WIDE
    )


def _pays(k: int, block: Block) -> bool:
    _, rows, cols = block.shape
    thin = k * (rows * rows + cols * cols + rows * cols)
    return thin < 0.9 * rows * cols * (rows + cols)


def _close(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((actual - expected).norm() <= tolerance * expected.norm())
