"""``nn.MultiheadAttention``: four linear layers that no module hook sees.

The projections are function calls on slices of one parameter, so they are found by watching the
calls of ``linear`` while the module runs.
"""

from collections.abc import Sequence
from types import FunctionType
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from natgrad.layers.functional import Projection, Seen, Watch
from natgrad.layers.registry import register


class AttentionProjection(Projection[nn.MultiheadAttention]):
    """A slice of the packed projection, or a weight of its own."""

    @property
    def claims(self) -> tuple[nn.Module, ...]:
        return (self.module.out_proj,)

    @classmethod
    def watch(cls, layers: Sequence[Any], seen: Seen, inputs: tuple[Any, ...]) -> Watch[Any]:
        return AttentionWatch(layers, seen, inputs)


@register(nn.MultiheadAttention)
def projections(name: str, module: nn.MultiheadAttention) -> list[AttentionProjection]:
    """Query, key, value and output projection as a layer each; biases come with their rows.

    Arguments:
        name: of the module in the model; that of a layer is ``name.query`` and so on.
        module: the attention, with packed or separate projections.
    """
    width = module.embed_dim
    packed = module.in_proj_weight is not None
    separate = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    layers = [
        AttentionProjection(
            f"{name}.{role}" if name else role,
            module,
            module.in_proj_weight if packed else separate[i],
            module.in_proj_bias,
            slice(i * width, (i + 1) * width),
        )
        for i, role in enumerate(("query", "key", "value"))
    ]
    out = module.out_proj
    layers.append(
        AttentionProjection(
            f"{name}.out_proj" if name else "out_proj",
            module,
            out.weight,
            out.bias,
            slice(0, width),
        )
    )
    return [layer for layer in layers if layer.parameters]


class AttentionWatch(Watch[AttentionProjection]):
    """Reports every projection of one attention module, samples first."""

    def __init__(
        self, layers: Sequence[AttentionProjection], seen: Seen, inputs: tuple[Any, ...]
    ) -> None:
        super().__init__(layers, seen, inputs)
        self.samples = 1

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is F.multi_head_attention_forward:
            query = args[0] if args else kwargs["query"]
            self.samples = query.shape[1] if query.ndim == 3 else 1  # [tokens, samples, features]
            with self:  # a mode is off inside itself; the projections are in there
                return _attend(*args, **kwargs)
        out = func(*args, **kwargs)
        if func is F.linear:
            x, weight = (*args, *kwargs.values())[:2]
            self._report(x, weight, out)
        return out

    def _report(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        source = weight if weight._base is None else weight._base
        # Of the rows of source in this call. A source may lie anywhere in a flat buffer.
        first = (weight.storage_offset() - source.storage_offset()) // weight.shape[1]
        for layer in self.layers:
            if layer.source is not source:
                continue
            start = (layer.own(source).start or 0) - first
            if 0 <= start < weight.shape[0]:
                own = slice(start, start + layer.rows)
                kept = samples_first(x.detach(), self.samples)
                self.seen(layer, kept, out, _Own(self.samples, own))


def _undispatched(func: FunctionType) -> FunctionType:
    """A function of torch that does not ask modes first: one that is on would get it again."""
    names = {**func.__globals__, "has_torch_function": lambda _: False}
    return FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)


_attend = _undispatched(cast(FunctionType, F.multi_head_attention_forward))


class _Own:
    """The gradient of a projection's output -> that of the layer's rows, samples in front."""

    def __init__(self, samples: int, rows: slice) -> None:
        self.samples, self.rows = samples, rows

    def __call__(self, g: Tensor) -> Tensor:
        return samples_first(g[..., self.rows], self.samples)


def samples_first(t: Tensor, samples: int) -> Tensor:
    """``[tokens, samples, d]`` or ``[tokens * samples, d]`` -> ``[samples, tokens, d]``.

    Arguments:
        t: ``[tokens, samples, d]``, or with the two first axes flattened.
        samples: how many there are.
    """
    tokens = t.shape[:-1].numel() // max(1, samples)  # -1 is ambiguous for an empty batch
    return t.reshape(tokens, samples, t.shape[-1]).transpose(0, 1)
