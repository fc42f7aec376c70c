"""Whether a model still has the parameters that its blocks were made for.

While a training goes on, layers are frozen and unfrozen one after the other, pruned, resized, and
replaced as a whole; loading with ``assign=True`` replaces every parameter. A block whose weight is
not the model's any more must not precondition the one that was, and a parameter without a block has
to be told of, as it would keep its plain gradient without a word.

To look at all modules takes some microseconds and is done at every step; what has changed is worked
out only if something has.
"""

from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import nn

from natgrad.capture.blocks import Block
from natgrad.capture.discovery import clean
from natgrad.comm.layouts import is_sharded
from natgrad.errors import CoverageError
from natgrad.layers import Layer

_ANEW = "make a new KFAC for the model as it is now"


class ModelChanges:
    """What is in the modules of ``root``, compared with what was there the last time."""

    def __init__(self, root: nn.Module, blocks: Iterable[Block]) -> None:
        self.root, self.blocks = root, list(blocks)
        self._shapes = {p: p.shape for block in self.blocks for p in block.parameters}
        self._paths = {block: _paths(block.layers[0]) for block in self.blocks}
        self._trained = {p for p in root.parameters() if p.requires_grad}
        self._remember()

    def found(self) -> bool:
        for own, count, children, before in self._modules:
            if len(own) != count or list(children.values()) != before:
                return True
        for own, name, p, trained, shape in self._entries:
            now = own.get(name)
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

    def follow(self) -> list[str]:
        """Mark the blocks that the model has no longer; returns a sentence for each problem."""
        self._remember()
        named = {clean(name): p for name, p in self.root.named_parameters()}
        names = {p: name for name, p in named.items()}
        problems = []
        told: set[nn.Parameter] = set()
        for block in self.blocks:
            before, paths = self._paths[block], _paths(block.layers[0])
            reasons = {p: self._reason(p, names) for p in block.parameters}
            for p, path in before.items():
                if path != paths.get(p, path):
                    reasons[p] = "pruned or parametrised"
            frozen = all(reason == "frozen" for reason in reasons.values())
            block.lose(next(filter(None, reasons.values()), ""))
            if block.lost and not frozen:  # what is not trained needs no preconditioning
                which = next(p for p, reason in reasons.items() if reason)
                problems.append(
                    f"{block.kind} {block.name!r} keeps its plain gradient from now on, as "
                    f"{names.get(which, 'a parameter of it')} was {block.lost} after KFAC was "
                    f"made: {_ANEW}."
                )
                told |= {p for layer in block.layers for p in layer.module.parameters()}
                told |= {p for name, p in named.items() if name.startswith(f"{block.name}.")}
        if problems and all(block.lost for block in self.blocks):
            raise CoverageError(
                f"No block of KFAC belongs to {type(self.root).__name__} as it is now (parameters "
                f"were {self.blocks[0].lost}): {_ANEW}, after load_state_dict(assign=True) or "
                "whatever else has replaced them; inside of 'with kfac.unwatched():' a model may "
                "be called with other weights."
            )
        new = [
            name
            for name, p in named.items()
            if p.requires_grad and p not in self._shapes and p not in self._trained | told
        ]
        if new:
            self._trained |= {named[name] for name in new}
            others = f" and {len(new) - 1} others" if len(new) > 1 else ""
            problems.append(
                f"{new[0]!r}{others} were frozen, or not there, when KFAC was made, and keep their "
                f"plain gradients: {_ANEW}."
            )
        return problems

    def uses(self) -> list[tuple[Block, Layer[Any]]]:
        """The layers that still use the weight of their block."""
        modules = set(self.root.modules())
        return [
            (block, layer)
            for block in self.blocks
            for layer in block.layers
            if block.lost != "resized" and layer.module in modules and _holds(layer)
        ]

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


def _paths(layer: Layer[Any]) -> dict[nn.Parameter, str]:
    """The name that a module has for each of a layer's parameters. Where it makes its weight of a
    parameter, that has another one from then on."""
    return {p: path for path, p in layer.module.named_parameters() if p in set(layer.parameters)}


def _shape(p: nn.Parameter | None) -> torch.Size | None:
    return None if p is None else p.shape


def _holds(layer: Layer[Any]) -> bool:
    own = set(layer.module.parameters())
    return all(p in own or is_sharded(p) for p in layer.parameters)
