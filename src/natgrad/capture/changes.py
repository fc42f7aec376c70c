"""Whether a model still has the parameters that its blocks were made for, and its blocks since.

While a training goes on, layers are unfrozen one after the other, frozen again, pruned, resized,
and replaced as a whole; loading with ``assign=True`` replaces every parameter. A block whose weight
is not the model's any more must not precondition the one that was, and what is trained now needs a
block:

    as it was               its block, with all that it knows
    frozen as a whole       its block, asleep, until the layer is trained again
    anything else           a new block, which has seen no data

To look at all modules takes some microseconds and is done at every step; what has changed is worked
out only if something has, and blocks are looked for only if something is trained that has none.
"""

import hashlib
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from natgrad.capture.blocks import Block
from natgrad.capture.discovery import BY_THE_USER, Uncovered, clean
from natgrad.comm.layouts import is_sharded
from natgrad.layers import Layer

DIGEST = 1 << 20  # what differs between ranks is below it, so that sums of squares are exact


class ModelChanges:
    """What is in the modules of ``root``, compared with what was there the last time."""

    def __init__(self, root: nn.Module, blocks: Iterable[Block]) -> None:
        self.root = root
        self.adopt(blocks)

    def adopt(self, blocks: Iterable[Block]) -> None:
        """These are the model's blocks from now on; what is trained without one is known of."""
        self.blocks = list(blocks)
        self._shapes = {p: p.shape for block in self.blocks for p in block.parameters}
        self._paths = {block: _paths(block.layers[0]) for block in self.blocks}
        self._known = {p for p in self.root.parameters() if p.requires_grad}
        self._remember()
        self.settle()

    def found(self) -> bool:
        for own, count, children, before in self._modules:
            if len(own) != count or list(children.values()) != before:
                return True
        for own, name, p, trained, shape in self._entries:
            now: torch.Tensor | None = own.get(name)
            if now is not None and not isinstance(now, nn.Parameter):
                continue  # torch.func.functional_call puts it there for the time of a call
            if p is None or now is None:
                if now is not p:
                    return True
            elif (
                now.requires_grad is not trained
                or (now is not p and not is_sharded(p))
                or p.shape != shape
            ):
                return True
        return False

    def follow(self) -> None:
        """Mark the blocks that cannot precondition the model as it is now, and wake the others."""
        self._remember()
        here = set(self.root.parameters())
        for block in self.blocks:
            before, paths = self._paths[block], _paths(block.layers[0])
            reasons = {p: self._reason(p, here) for p in block.parameters}
            for p, path in before.items():
                if path != paths.get(p, path):
                    reasons[p] = "pruned or parametrised"
            asleep = all(reason == "frozen" for reason in reasons.values())
            reason = next(filter(None, reasons.values()), "")
            block.lose(reason, asleep=asleep)

    def without_block(self) -> dict[str, nn.Parameter]:
        """What is trained now and has no block, and was not known to have none."""
        covered = {p for block in self.blocks if not block.lost for p in block.parameters}
        lost = {p for block in self.blocks if block.lost for p in block.parameters}
        return {
            clean(name): p
            for name, p in self.root.named_parameters()
            if p.requires_grad and p not in covered and (p in lost or p not in self._known)
        }

    def gone(self) -> bool:
        """Whether a block belongs to nothing that the model has."""
        return any(block.lost and not block.asleep for block in self.blocks)

    def know(self, missing: Mapping[str, nn.Parameter]) -> None:
        """These have no block and will get none."""
        self._known |= set(missing.values())

    def merged(self, found: Sequence[Block]) -> list[Block]:
        """The blocks of the model as it is now: those that were here as they were, asleep or not,
        and new ones of ``found`` for all else, in the order of the modules."""
        same = {_identity(block): block for block in self.blocks if not block.lost}
        blocks = [same.get(_identity(block), block) for block in found]
        names = {block.name for block in blocks}
        blocks += [b for b in self.blocks if b.asleep and b.name not in names]
        place = {module: index for index, module in enumerate(self.root.modules())}
        return sorted(blocks, key=lambda b: min(place.get(u.module, 0) for u in b.layers))

    def problems(
        self, missing: Mapping[str, nn.Parameter], uncovered: Mapping[str, Uncovered]
    ) -> list[str]:
        """A sentence for each parameter that had to have a block and got none."""
        lost = {p: block.lost for block in self.blocks if block.lost for p in block.parameters}
        told = []
        for name, p in missing.items():
            if name not in uncovered or (why := uncovered[name].reason) in BY_THE_USER:
                continue
            what = f", since it was {lost[p]}" if p in lost else ""
            told.append(f"{name!r} keeps its plain gradient{what}: {why}.")
        return told

    def cannot_be_made(self, missing: Mapping[str, nn.Parameter], why: str) -> str:
        """The sentence where no block can be made for what has none."""
        first, others = next(iter(missing)), len(missing) - 1
        which = f"{first!r} and {others} others keep" if others else f"{first!r} keeps"
        lost = {p: block.lost for block in self.blocks if block.lost for p in block.parameters}
        what = lost.get(missing[first], "unfrozen or added")
        self.know(missing)
        return (
            f"{which} their plain gradients from now on, as parameters were {what} after KFAC was "
            f"made and {why}: make a new KFAC for the model as it is now."
        ).replace("keeps their plain gradients", "keeps its plain gradient")

    def uses(self) -> list[tuple[Block, Layer[Any]]]:
        """The layers that still use the weight of their block."""
        modules = set(self.root.modules())
        return [
            (block, layer)
            for block in self.blocks
            for layer in block.layers
            if block.lost != "resized" and layer.module in modules and _holds(layer)
        ]

    # What ranks compare.

    def settle(self) -> None:
        """All ranks have changed their models to what this one is now."""
        self._settled = self._signature()
        self._settled_objects = self._objects()

    def digest(self) -> int:
        """0 if the model is as all ranks had it, and otherwise a number of what it is now: not 0,
        below `DIGEST`, the same on ranks that have changed it in the same way."""
        now, objects = self._signature(), self._objects()
        replaced = [name for name, p in objects.items() if p is not self._settled_objects.get(name)]
        if now == self._settled and not replaced:
            return 0
        text = repr((now, replaced)).encode()
        return 1 + int.from_bytes(hashlib.sha256(text).digest()[:4], "big") % (DIGEST - 1)

    def _signature(self) -> list[tuple[str, tuple[int, ...], bool]]:
        named = self.root.named_parameters()
        return [(clean(name), tuple(p.shape), p.requires_grad) for name, p in named]

    def _objects(self) -> dict[str, nn.Parameter]:
        """Those of FSDP are other ones in every forward pass."""
        return {clean(n): p for n, p in self.root.named_parameters() if not is_sharded(p)}

    def _reason(self, p: nn.Parameter, here: Container[nn.Parameter]) -> str:
        """Why a block can no longer precondition one of its parameters; empty if it can."""
        if p not in here and not is_sharded(p):
            return "replaced"
        if p.shape != self._shapes[p]:
            return "resized"
        return "" if p.requires_grad else "frozen"

    def _remember(self) -> None:
        modules = list(self.root.modules())
        self._modules = [
            (m._parameters, len(m._parameters), m._modules, list(m._modules.values()))
            for m in modules
        ]
        self._entries = [
            (m._parameters, name, p, p is not None and p.requires_grad, _shape(p))
            for m in modules
            for name, p in m._parameters.items()
        ]


def _identity(block: Block) -> tuple[Any, ...]:
    """Two blocks with the same are of the same weight, used by the same modules. (What is kept of
    it was chosen when the first of them was made.)"""
    return (
        block.name,
        block.kind,
        block.shape,
        tuple(map(id, block.parameters)),
        tuple(id(layer.module) for layer in block.layers),
    )


def _paths(layer: Layer[Any]) -> dict[nn.Parameter, str]:
    """The name that a module has for each of a layer's parameters. Where it makes its weight of a
    parameter, that has another one from then on."""
    return {p: path for path, p in layer.module.named_parameters() if p in set(layer.parameters)}


def _shape(p: nn.Parameter | None) -> torch.Size | None:
    return None if p is None else p.shape


def _holds(layer: Layer[Any]) -> bool:
    own = set(layer.module.parameters())
    return all(p in own or is_sharded(p) for p in layer.parameters)
