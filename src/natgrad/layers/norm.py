"""Norm layers: ``y = weight * x_hat + bias``, one row of ``W [channels, 2]`` per channel.

Row ``r`` has the input ``(x_hat[r], 1)``, which is recomputed
from the module's input. A sample's gradient is ``(Σ_s g x_hat, Σ_s g)``, two numbers a row.
"""

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from natgrad.layers.base import real
from natgrad.layers.elementwise import Elementwise
from natgrad.layers.registry import register
from natgrad.linalg.workspace import workspace

_PIECE = 1 << 19  # numbers


class Trailing(Elementwise[Any]):
    """Normalises over the last axes: every element of ``normalized_shape`` is a row.

    Arguments:
        name: of the module in the model, as `named_modules` has it.
        module: its ``weight`` and ``bias``, those that require gradients, become the matrix.
        normalized_shape: for a module that does not say it, with ``eps``.
        eps: what is added to the variance, or to the mean square.
    """

    def __init__(
        self,
        name: str,
        module: Any,
        normalized_shape: tuple[int, ...] | None = None,
        eps: float | None = None,
    ) -> None:
        super().__init__(name, module)
        self.normalized_shape = normalized_shape or tuple(module.normalized_shape)
        self.eps: Any = module.eps if normalized_shape is None else eps
        self.input_features = self.output_features = len(self.normalized_shape)

    @property
    def rows(self) -> int:
        return prod(self.normalized_shape)

    def split(self, weight: Tensor) -> Tensor:
        return weight.reshape(-1)

    def as_bias(self, bias: Tensor) -> Tensor:
        return bias.view(1, -1)

    def _positions(self, t: Tensor) -> Tensor:
        """``[n, ..., *normalized_shape]`` -> ``[n, s, rows]``."""
        features = len(self.normalized_shape)
        if t.ndim == features + 1:
            t = t.unsqueeze(1)
        return t.flatten(1, t.ndim - 1 - features).flatten(2)

    def gradients(self, g: Tensor) -> Tensor:
        return self._positions(g)


@register(nn.LayerNorm)
class LayerNorm(Trailing):
    def normalised(self, x: Tensor) -> Tensor:
        x = x.to(real(x.dtype))
        return self._positions(F.layer_norm(x, self.normalized_shape, eps=self.eps))


@register(nn.RMSNorm)
class RMSNorm(Trailing):
    def normalised(self, x: Tensor) -> Tensor:
        x = x.to(real(x.dtype))
        return self._positions(F.rms_norm(x, self.normalized_shape, eps=self.eps))


class Channels(Elementwise[Any]):
    """Input ``[n, channels, *space]``: pixels are the positions."""

    def _positions(self, t: Tensor) -> Tensor:
        """``[n, c, *space]`` -> ``[n, s, c]``."""
        return t.unsqueeze(1) if t.ndim == 2 else t.flatten(2).mT

    def gradients(self, g: Tensor) -> Tensor:
        return self._positions(g)


class ChannelNorm(Channels):
    """A LayerNorm, or an RMSNorm where it is not ``centred``, over the channels of each pixel.

    Arguments:
        name: of the module in the model.
        module: whose ``weight`` and ``bias`` have a number for each channel.
        channels: how many.
        eps: what is added to the variance, or to the mean square.
        centred: whether the mean is subtracted.
    """

    def __init__(self, name: str, module: Any, channels: int, eps: float, *, centred: bool) -> None:
        super().__init__(name, module)
        self.channels, self.eps, self.centred = channels, eps, centred
        self.input_features = self.output_features = None

    @property
    def rows(self) -> int:
        return self.channels

    def normalised(self, x: Tensor) -> Tensor:
        norm = F.layer_norm if self.centred else F.rms_norm
        return norm(self._positions(x.to(real(x.dtype))), (self.channels,), eps=self.eps)


@register(nn.GroupNorm)
class GroupNorm(Channels):
    @property
    def rows(self) -> int:
        return int(self.module.num_channels)

    def normalised(self, x: Tensor) -> Tensor:
        m = self.module
        return self._positions(F.group_norm(x.to(real(x.dtype)), m.num_groups, eps=m.eps))


@register(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
class InstanceNorm(Channels):
    def __init__(self, name: str, module: Any) -> None:
        super().__init__(name, module)
        self.input_features = self.output_features = module._get_no_batch_dim()

    @property
    def rows(self) -> int:
        return int(self.module.num_features)

    def keep(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Any:
        m, x = self.module, super().keep(args, kwargs, out)
        x = x.to(real(x.dtype))
        own = m.training or not m.track_running_stats
        # The running statistics may move before the backward pass, so they are used now.
        return F.instance_norm(
            x,
            None if own else m.running_mean,
            None if own else m.running_var,
            use_input_stats=own,
            eps=m.eps,
        )

    def normalised(self, x: Tensor) -> Tensor:
        return self._positions(x)


@register(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
class BatchNorm(Channels):
    """``x_hat = (x - mean) * scale`` with the statistics of the batch, or the running ones in eval.

    ``sum_s g x_hat = scale (sum_s g x - mean sum_s g)``, so ``x_hat`` itself is never made.
    """

    @property
    def rows(self) -> int:
        return int(self.module.num_features)

    def keep(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Any:
        x = super().keep(args, kwargs, out)
        return x, *self._statistics(x, out)

    def some(self, x: tuple[Tensor, Tensor, Tensor], rows: Tensor) -> Any:
        return x[0].index_select(0, rows), *x[1:]

    def _statistics(self, x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and reciprocal deviation of every channel, as this call used them."""
        m = self.module
        if not m.training and m.running_mean is not None:
            return m.running_mean.clone(), (m.running_var + m.eps).rsqrt()
        # The forward pass has them and a second pass over x would cost three times the layer. Saved
        # tensors that somebody packed (activation checkpointing) must not be unpacked here.
        packed = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        if not packed and "NativeBatchNorm" in type(out.grad_fn).__name__:
            return out.grad_fn._saved_result1, out.grad_fn._saved_result2  # type: ignore[union-attr]
        axes = [i for i in range(x.ndim) if i != 1]
        variance, mean = torch.var_mean(x.to(real(x.dtype)), axes, correction=0)
        return mean, (variance + m.eps).rsqrt()

    def normalised(self, x: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        data, mean, scale = x
        return (self._positions(data).to(mean.dtype) - mean) * scale

    def pixel_sums(
        self, x: tuple[Tensor, Tensor, Tensor], g: Tensor, samples: int | None
    ) -> tuple[Tensor, Tensor]:
        if samples and len(g) != samples:
            return super().pixel_sums(x, g, samples)
        (data, mean, scale), g = x, g.to(real(g.dtype))
        data = data.to(g.dtype)
        if data.ndim == 2:
            return (data - mean) * scale * g, g
        products, of_bias = product_sums(data, g)
        return (products - mean * of_bias) * scale, of_bias


def product_sums(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """``sum_s x g [n, c]`` of ``[n, c, *space]``, and ``sum_s g``, a cache-sized piece of samples
    at a time: the product of all would be as large as the activations.

    Arguments:
        x: ``[n, c, *space]``.
        g: of the same shape.
    """
    each = max(1, prod(x.shape[1:]))
    count = max(1, min(len(x), _PIECE // each))
    product = workspace("pixels", (count, *x.shape[1:]), x)
    sums, of_g = x.new_empty(2, *x.shape[:2])
    for i in range(0, len(x), count):
        piece = g[i : i + count]
        part = product[: len(piece)]
        torch.mul(x[i : i + count], piece, out=part)
        torch.sum(part.flatten(2), 2, out=sums[i : i + count])
        torch.sum(piece.flatten(2), 2, out=of_g[i : i + count])
    return sums, of_g
