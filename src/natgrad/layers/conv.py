"""Convolutions: a linear layer on every patch (im2col), columns ordered (kernel position, channel).

The positions ``s`` are the output pixels, and ``a[n, s]`` is the patch below pixel ``s``. Patches
of a whole batch would be ``kernel`` times its activations, so they are made a piece at a time, or,
for stride 1, not at all: ``linalg/correlation.py`` gets ``Σ a aᵀ`` from the distinct correlations.
"""

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from natgrad.layers.axes import per_sample
from natgrad.layers.base import SharedInput
from natgrad.layers.registry import register
from natgrad.linalg.correlation import ConvGeometry, Correlations
from natgrad.linalg.forms import Form, RowForm, Triangle
from natgrad.linalg.patches import channels_last, patch_pieces, patch_rows, windows

Pads = tuple[tuple[int, int], ...]


@register(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class Conv(SharedInput[Any]):
    """Stride, dilation, groups, every padding; ``W [groups, outputs, kernel * inputs]``."""

    module: nn.Conv1d | nn.Conv2d | nn.Conv3d

    def __init__(self, name: str, module: Any) -> None:
        super().__init__(name, module)
        self.groups = module.groups
        self.dims = len(module.kernel_size)
        self.input_features = self.output_features = self.dims + 1
        self.pads = numeric_padding(module)
        # Modes other than zeros are padded before anything else, and then there is no padding.
        self.zero_pads = self.pads if module.padding_mode == "zeros" else ((0, 0),) * self.dims

    @property
    def rows(self) -> int:
        return self.module.out_channels // self.groups

    @property
    def inputs_per_row(self) -> int:
        return self.module.in_channels // self.groups * prod(self.module.kernel_size)

    def as_weight(self, m: Tensor) -> Tensor:
        split: Tensor = m.unflatten(-1, (*self.module.kernel_size, -1))
        return split.movedim(-1, 2)  # [groups, rows, inputs, *kernel]

    def split(self, weight: Tensor) -> Tensor:
        by_group: Tensor = weight.unflatten(0, (self.groups, -1))
        return by_group

    def _correlation_geometry(self) -> ConvGeometry | None:
        """The geometry whose distinct correlation blocks are all there is to A, if that pays."""
        m = self.module
        if self.dims > 2 or self.groups > 1 or self.weight is None or any(s != 1 for s in m.stride):
            return None
        one = self.dims == 1
        geometry = ConvGeometry(
            kernel=(1 if one else m.kernel_size[0], m.kernel_size[-1]),
            padding=((0, 0) if one else self.zero_pads[0], self.zero_pads[-1]),
            dilation=(1 if one else m.dilation[0], m.dilation[-1]),
        )
        return geometry if Correlations.pays(geometry) else None

    def input_form(self) -> Form:
        if (geometry := self._correlation_geometry()) is None:
            return super().input_form()
        return Correlations(self.module.in_channels, geometry, self.bias is not None)

    def _padded(self, x: Tensor) -> Tensor:
        """Padded, if that is not by zeros."""
        if self.module.padding_mode == "zeros" or not any(map(any, self.pads)):
            return x
        sides = [side for pair in reversed(self.pads) for side in pair]
        return F.pad(x, sides, mode=self.module.padding_mode)

    def _windows(self, x: Tensor) -> Tensor:
        m = self.module
        last = channels_last(self._padded(x), self.zero_pads)
        return windows(last, m.kernel_size, m.stride, m.dilation)

    def inputs(self, x: Tensor) -> Tensor:
        return patch_rows(self._windows(x), self.dims, self.groups)

    def gradients(self, g: Tensor) -> Tensor:
        g = g.unflatten(1, (self.groups, -1)).flatten(3)  # [n, groups, rows, s]
        return g.permute(1, 0, 3, 2)

    def add_inputs(self, x: Tensor, form: Form, kept: Tensor) -> int:
        x = x.to(form.operand_dtype(x, kept))
        if isinstance(form, Correlations):
            x = self._padded(x)
            return form.add(kept, x if self.dims == 2 else x.unsqueeze(2))
        assert isinstance(form, RowForm)
        m = self.module
        if prod(m.kernel_size) == 1 and self.groups == 1 and self.weight is not None:
            x = self._padded(x)
            if not any(map(any, self.zero_pads)):
                strided = [slice(None, None, s) for s in m.stride]
                return self._add_pixels(x[(slice(None), slice(None), *strided)], form, kept)
        positions, padded = 0, self._padded(x)
        for rows in patch_pieces(
            padded, self.zero_pads, m.kernel_size, m.stride, m.dilation, self.groups
        ):
            form.add_rows(kept, rows[..., : self.weight_cols])
            positions += rows.shape[1]
        return positions

    def add_gradients(self, x: Tensor, g: Tensor, form: Form, kept: Tensor) -> None:
        assert isinstance(form, RowForm)
        if self.groups > 1:
            super().add_gradients(x, g, form, kept)
        else:
            add_pixels(g.to(form.operand_dtype(g, kept)), form, kept)

    def position_sums(
        self, x: Tensor, g: Tensor, samples: int | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, int]:
        # Summing the windows as a view never writes the patches out.
        view = self._windows(x.to(dtype))
        axes = tuple(range(1, 1 + self.dims))
        positions = prod(view.shape[1 : 1 + self.dims])
        total = patch_rows(view.sum(axes, keepdim=True), self.dims, self.groups)
        total = per_sample(total[..., : self.weight_cols], samples)
        positions *= total.shape[2]
        total = total.sum(2)
        if self.bias is not None:
            total = torch.cat([total, total.new_full((*total.shape[:-1], 1), positions)], -1)
        return total, per_sample(self.gradients(g).to(dtype), samples).sum(2), positions

    def _add_pixels(self, x: Tensor, form: RowForm, kept: Tensor) -> int:
        if self.bias is not None:
            rows = x.movedim(1, -1).reshape(1, -1, x.shape[1])
            form.add_rows(kept, rows)
        else:
            add_pixels(x, form, kept)
        return x.numel() // max(1, x.shape[1])


@register(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def transposed_convolution(name: str, module: Any) -> list[SharedInput[Any]]:
    """Weight and bias are two blocks: the bias acts on other positions than the weight.

    Arguments:
        name: of the module in the model; the bias gets ``name.bias`` beside a weight.
        module: a transposed convolution.
    """
    layers: list[SharedInput[Any]] = []
    weight, bias = ConvTranspose(name, module), ChannelBias(name, module)
    if weight.weight is not None:
        layers.append(weight)
    if bias.bias is not None:
        if weight.weight is not None:
            bias.name = f"{name}.bias" if name else "bias"
        layers.append(bias)
    return layers


class ConvTranspose(SharedInput[Any]):
    """``W [groups, kernel * outputs, inputs]``: an input pixel is spread over a patch of the
    output, so the gradient of ``W a`` at that pixel is the patch of the output's gradient."""

    def __init__(self, name: str, module: Any) -> None:
        super().__init__(name, module)
        self.bias = None
        self.groups = module.groups
        self.dims = len(module.kernel_size)
        self.input_features = self.output_features = self.dims + 1

    @property
    def rows(self) -> int:
        return int(self.module.out_channels // self.groups * prod(self.module.kernel_size))

    @property
    def inputs_per_row(self) -> int:
        return int(self.module.in_channels // self.groups)

    def as_weight(self, m: Tensor) -> Tensor:
        m = m.unflatten(1, (*self.module.kernel_size, -1))  # [groups, *kernel, outputs, inputs]
        return m.movedim((-1, -2), (1, 2))

    def split(self, weight: Tensor) -> Tensor:
        by_group: Tensor = weight.unflatten(0, (self.groups, -1))
        return by_group

    def inputs(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (self.groups, -1)).flatten(3)  # [n, groups, inputs, s]
        return x.permute(1, 0, 3, 2)

    def gradients(self, g: Tensor) -> Tensor:
        m = self.module
        view = windows(
            channels_last(g, [(p, p) for p in m.padding]), m.kernel_size, m.stride, m.dilation
        )
        # An output_padding of a stride or more leaves room for windows that belong to no input.
        spare = [o // s for o, s in zip(m.output_padding, m.stride, strict=True)]
        size = [n - more for n, more in zip(view.shape[1:], spare, strict=False)]
        return patch_rows(view[(slice(None), *map(slice, size))], self.dims, self.groups)


class ChannelBias(SharedInput[Any]):
    """A bias per channel alone: ``W [channels, 1]`` on a constant input."""

    inputs_per_row = 0

    def __init__(self, name: str, module: Any) -> None:
        super().__init__(name, module)
        self.weight = None
        self.output_features = len(module.kernel_size) + 1

    @property
    def rows(self) -> int:
        return int(self.module.out_channels)

    def keep(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Any:
        """The positions of the output: a view without any memory, ``[n, s, 0]``."""
        shape = self.arrange(out.detach()).shape
        return out.detach().new_empty(shape[0], prod(shape[2:]), 0)

    def inputs(self, x: Tensor) -> Tensor:
        return x

    def gradients(self, g: Tensor) -> Tensor:
        return g.flatten(2).mT


def numeric_padding(module: Any) -> Pads:
    """``(before, after)`` for each dimension; ``same`` pads the odd one behind, as torch does.

    Arguments:
        module: a convolution, whose padding is numbers, ``"valid"`` or ``"same"``.
    """
    if module.padding == "valid":
        return ((0, 0),) * len(module.kernel_size)
    if module.padding == "same":
        total = [d * (k - 1) for k, d in zip(module.kernel_size, module.dilation, strict=True)]
        return tuple((t // 2, t - t // 2) for t in total)
    return tuple((p, p) for p in module.padding)


def add_pixels(x: Tensor, form: RowForm, kept: Tensor) -> None:
    """Add the second moment of channels over samples and pixels, by the cheaper of two ways.

    Arguments:
        x: ``[n, c, *space]``.
        form: how it is kept.
        kept: flat buffer of ``form``, added to in place.
    """
    channels, pixels = x.shape[1], prod(x.shape[2:])
    last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    few = channels >= 256 and pixels < 400
    if not isinstance(form, Triangle) or (last and not x.is_contiguous()) or few:
        # Already pixel-major, or so few pixels an image that one transposing copy is cheap.
        form.add_rows(kept, x.movedim(1, -1).reshape(1, -1, channels))
    else:
        form.add_columns(kept, x.flatten(2))
