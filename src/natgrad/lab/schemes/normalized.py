"""Which layers are scale-invariant: ``norm(c W x) = norm(W x)``, as the next thing normalises."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from natgrad.capture.passes import tensors_of
from natgrad.errors import SettingError

_LAYERS = (nn.Linear, nn.modules.conv._ConvNd)
_BY_CHANNEL = nn.modules.batchnorm._NormBase  # batch and instance normalisation
NORMS = (_BY_CHANNEL, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def normalized_layers(model: nn.Module, *inputs: Any, **named: Any) -> dict[str, nn.Module]:
    """Linear layers and convolutions, by name, whose output goes to a norm layer and nowhere else.

    Found by calling ``model(*inputs, **named)`` once, in evaluation mode and without gradients. A
    layer with a bias counts only before normalisation by channel, which takes the bias away.

    Arguments:
        model: is called once.
        inputs: its positional arguments.
        named: its keyword arguments.
    """
    watch = _Watch()
    handles = []
    for module in model.modules():
        if isinstance(module, _LAYERS):
            handles.append(module.register_forward_hook(watch.made))
        elif isinstance(module, NORMS):
            handles.append(module.register_forward_pre_hook(watch.normalizes, with_kwargs=True))
            handles.append(module.register_forward_hook(watch.normalized, always_call=True))
    try:
        with _evaluation(model), watch:
            out = model(*inputs, **named)
    finally:
        for handle in handles:
            handle.remove()
    watch.taken(out)
    good = watch.layers()
    elsewhere = {p for module in model.modules() if module not in good for p in _own(module)}
    found = {
        name: module
        for name, module in model.named_modules()
        if module in good and module._parameters.get("weight") not in {None, *elsewhere}
    }
    if not found:
        raise SettingError(
            f"No linear layer or convolution of this {type(model).__name__} is followed by a norm "
            "layer and by nothing else: choose the layers whose scale does not matter yourself."
        )
    return found


@dataclass
class _Output:
    """What a layer returned, kept so that no other tensor is taken for it, and where it went."""

    layer: nn.Module
    tensor: Tensor
    normalized: bool = False
    elsewhere: bool = False


class _Watch(TorchFunctionMode):
    """Sees which functions take the outputs of layers."""

    def __init__(self) -> None:
        super().__init__()
        self._outputs: dict[int, _Output] = {}
        self._inside = 0  # of norm layers

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        # A size or a dtype is not yet a use.
        if not self._inside and any(True for _ in tensors_of(out)):
            self.taken((args, kwargs))
        return out

    def made(self, layer: nn.Module, args: Any, out: Tensor) -> None:
        self._outputs[id(out)] = _Output(layer, out)

    def normalizes(self, norm: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._inside += 1
        taken = self._outputs.get(id(args[0] if args else kwargs.get("input")))
        if taken is not None:
            taken.normalized |= _removes_bias(norm, taken)

    def normalized(self, norm: nn.Module, args: Any, out: Any) -> None:
        self._inside -= 1

    def taken(self, values: Any) -> None:
        for tensor in tensors_of(values):
            if id(tensor) in self._outputs:
                self._outputs[id(tensor)].elsewhere = True

    def layers(self) -> set[nn.Module]:
        """Those all of whose outputs were normalised and went nowhere else."""
        outputs = self._outputs.values()
        bad = {out.layer for out in outputs if out.elsewhere or not out.normalized}
        return {out.layer for out in outputs} - bad


def _removes_bias(norm: nn.Module, taken: _Output) -> bool:
    if taken.layer._parameters.get("bias") is None:
        return True
    by_channel = not isinstance(taken.layer, nn.Linear) or taken.tensor.ndim == 2
    return isinstance(norm, _BY_CHANNEL) and by_channel


def _own(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module._parameters.values() if p is not None]


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
