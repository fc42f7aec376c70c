"""Which axis of a layer's tensors counts samples.

A model with its samples in front may hold layers with the tokens in front:
``nn.TransformerEncoder`` is made so by default, and is called with ``x.transpose(0, 1)``. What is
kept of whole samples would then be kept of whole tokens. The number of samples is known, so the
axis is found by its size:

    [10, 32, d] for 32 samples    axis 1
    [320, d]                      axis 0, with positions folded into it
    [32, 32, d], [64, 32, d]      in doubt: as it was in a batch that left none, or as torch's
                                  attention layers say; else as in the rest of the model

Doubts of the last kind are told to the user, whose word decides.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any

from torch import Tensor, nn

from natgrad.layers import Layer


class SampleAxes:
    """Remembers what batches have shown of each layer."""

    def __init__(self, root: nn.Module) -> None:
        self.follow(root)
        self._known: dict[Layer[Any], int] = {}
        self._facing: dict[tuple[Layer[Any], int], Layer[Any]] = {}
        self.doubts: dict[str, None] = {}  # sentences, each once

    def follow(self, root: nn.Module) -> None:
        """The model may have other modules than before."""
        self._declared = _declared(root)

    def facing(self, layer: Layer[Any], x: Any, samples: int | None) -> Layer[Any]:
        """The layer as it is called with this input."""
        axis, features = layer.batch_axis, layer.input_features
        if features is None or not isinstance(x, Tensor):
            return layer
        sizes = x.shape[: x.ndim - features]
        if not layer.axis_given and samples is not None and samples > 1 and len(sizes) > 1:
            axis = self._axis(layer, sizes, samples)
        if axis == layer.batch_axis:
            return layer
        if (layer, axis) not in self._facing:
            turned = self._facing[layer, axis] = copy(layer)
            turned.batch_axis = axis
        return self._facing[layer, axis]

    def _axis(self, layer: Layer[Any], sizes: Sequence[int], samples: int) -> int:
        usual = layer.batch_axis if layer.batch_axis < len(sizes) else 0
        exact = [axis for axis, size in enumerate(sizes) if size == samples]
        folded = sizes[usual] % samples == 0
        if not exact or exact == [usual]:
            if exact or folded:
                self._known[layer] = usual
            return layer.batch_axis
        if len(exact) == 1 and not folded:
            self._known[layer] = exact[0]
            return exact[0]
        known = self._known.get(layer, self._declared.get(layer.module))
        if known is not None and (known in exact or (known == usual and folded)):
            return known
        if sizes[usual] != samples:
            axes = " or ".join(map(str, ([usual] if folded else []) + exact))
            self.doubts[
                f"{layer.kind} {layer.name!r} is called with {list(sizes)} for {samples} samples, "
                f"which may lie along axis {axes}; {usual} is taken. Say which it is, as in "
                f"loss=natgrad.MeanLoss(batch_axis={{{layer.name!r}: {exact[-1]}}})."
            ] = None
        return usual


def _declared(root: nn.Module) -> dict[nn.Module, int]:
    """By module inside of torch's own transformers: the axis that they are made for."""
    found: dict[nn.Module, int] = {}
    stacks: list[nn.Module] = []
    for module in root.modules():
        if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
            axis = 0 if module.self_attn.batch_first else 1
            found |= dict.fromkeys(module.modules(), axis)
        elif isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder):
            stacks.append(module)
    for stack in stacks:  # and the norm layer behind their layers
        inner = next((found[m] for m in stack.modules() if m in found), None)
        if inner is not None:
            found |= {m: inner for m in stack.modules() if m not in found}
    return found
