"""``nn.MultiheadAttention``: four linear layers that no module hook sees.

The projections are function calls on slices of one parameter, so they are found by watching the
calls of ``linear`` while the module runs.
"""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from natgrad.layers.base import SharedInput, trainable
from natgrad.layers.registry import register

# Called for every projection seen: layer, input, output, and what makes the layer's own gradient of
# the gradient of that output.
Seen = Callable[["Projection", Tensor, Tensor, Callable[[Tensor], Tensor]], None]


class Projection(SharedInput[nn.MultiheadAttention]):
    """Rows ``start:stop`` of a parameter of an attention module, applied to ``[n, s, features]``."""

    input_is_rows = True

    def __init__(
        self,
        name: str,
        module: nn.MultiheadAttention,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        rows: slice,
    ) -> None:
        super().__init__(name, module)
        self.source = weight
        self.weight, self.bias = trainable(weight), trainable(bias)
        self.slice = rows
        self._inputs = weight.shape[1]

    @property
    def rows(self) -> int:
        return int(self.slice.stop - self.slice.start)

    @property
    def inputs_per_row(self) -> int:
        return self._inputs

    def split(self, weight: Tensor) -> Tensor:
        return weight[self.own(weight)]

    def as_bias(self, bias: Tensor) -> Tensor:
        return bias[self.slice].unsqueeze(0)

    def own(self, weight: Tensor) -> slice:
        # A packed projection has the rows of all three; a separate weight has its own only.
        return self.slice if weight.shape[0] > self.rows else slice(None)

    def inputs(self, x: Tensor) -> Tensor:
        return x

    def gradients(self, g: Tensor) -> Tensor:
        return g


@register(nn.MultiheadAttention)
def projections(name: str, module: nn.MultiheadAttention) -> list[Projection]:
    """Query, key, value and output projection as a layer each; biases come with their rows."""
    width = module.embed_dim
    packed = module.in_proj_weight is not None
    separate = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    layers = [
        Projection(
            f"{name}.{role}" if name else role,
            module,
            module.in_proj_weight if packed else separate[i],  # type: ignore[arg-type]
            module.in_proj_bias,
            slice(i * width, (i + 1) * width),
        )
        for i, role in enumerate(("query", "key", "value"))
    ]
    out = module.out_proj
    layers.append(
        Projection(
            f"{name}.out_proj" if name else "out_proj",
            module,
            out.weight,
            out.bias,
            slice(0, width),
        )
    )
    return [layer for layer in layers if layer.parameters]


class AttentionWatch(TorchFunctionMode):
    """While entered, reports every projection of one attention module, samples first."""

    def __init__(self, layers: list[Projection], seen: Seen) -> None:
        super().__init__()
        self.layers, self.seen = layers, seen
        self.samples = 1

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            query = args[0] if args else kwargs["query"]
            self.samples = query.shape[1] if query.ndim == 3 else 1  # [tokens, samples, features]
            with self:  # a mode is off inside itself; the projections are in there
                return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if func is F.linear:
            x, weight = (*args, *kwargs.values())[:2]
            self._report(x, weight, out)
        return out

    def _report(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        source = weight if weight._base is None else weight._base
        first = weight.storage_offset() // weight.shape[1]  # of the rows of source in this call
        for layer in self.layers:
            if layer.source is not source:
                continue
            start = (layer.own(source).start or 0) - first
            if 0 <= start < weight.shape[0]:
                own = slice(start, start + layer.rows)
                self.seen(layer, samples_first(x, self.samples), out, _Own(self.samples, own))


class _Own:
    """The gradient of a projection's output -> that of the layer's rows, samples in front."""

    def __init__(self, samples: int, rows: slice) -> None:
        self.samples, self.rows = samples, rows

    def __call__(self, g: Tensor) -> Tensor:
        return samples_first(g[..., self.rows], self.samples)


def samples_first(t: Tensor, samples: int) -> Tensor:
    """``[tokens, samples, d]`` or ``[tokens * samples, d]`` -> ``[samples, tokens, d]``."""
    return t.reshape(-1, samples, t.shape[-1]).transpose(0, 1)
