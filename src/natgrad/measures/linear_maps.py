"""A layer as the linear map ``A`` that it is of one sample: its largest singular value, its rows.

    ‖A‖_σ = max |A x| / |x|,    ‖Aᵀ‖_{2,1} = Σ_rows |row|

A convolution's map is that of whole images with their padding, not that of its kernel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from natgrad.errors import SettingError
from natgrad.linalg import lanczos
from natgrad.linalg.results import Number

_AT_ONCE = 1 << 22  # numbers of rows that are written down at once


@dataclass(frozen=True)
class LinearMap:
    """A layer as the linear map of one sample.

    Arguments:
        forward: ``(x [k, *inputs], weight) -> [k, *outputs]``, linear in both.
        weight: the tensor that is passed to ``forward``.
        inputs: shape of one sample, without the batch's axis.
        plain: whether each input reaches an output through one entry of ``weight`` or none, so that
            the entries of ``A`` are those of ``weight``; reflected or repeated borders add some of
            them up.
    """

    forward: Callable[[Tensor, Tensor], Tensor]
    weight: Tensor
    inputs: tuple[int, ...]
    plain: bool = True

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x, self.weight)

    def spectral_norm(self, tolerance: float = 1e-6) -> Number:
        """``‖A‖_σ``; what is not converged is a bound from below, and ``method`` says so.

        Arguments:
            tolerance: bound on the relative residual of ``AᵀA``'s largest eigenvalue, between 0 and
                1.
        """
        found = lanczos.eigenpairs(
            self._normal,
            prod(self.inputs),
            1,
            tolerance=tolerance,
            dtype=self.weight.dtype,
            device=self.weight.device,
        )
        value = max(float(found.values[0]), 0.0) ** 0.5
        said = found.method if found.converged else f"NOT converged: {found.method}"
        return Number(value, said, 0.5 * value * float(found.residuals[0]), found.products)

    def _normal(self, x: Tensor) -> Tensor:
        """``AᵀA x`` for ``x [size, k]``: the gradient of ``|A x|²/2``."""
        columns = x.mT.reshape(-1, *self.inputs).detach().requires_grad_()
        with torch.enable_grad():
            (found,) = torch.autograd.grad(self(columns).square().sum() / 2, columns)
        return found.flatten(1).mT

    @torch.no_grad()
    def row_norms(self) -> float:
        """``‖Aᵀ‖_{2,1}``, the sum of the lengths of all rows."""
        if self.plain:
            ones = torch.ones(1, *self.inputs, dtype=self.weight.dtype, device=self.weight.device)
            squares = self.forward(ones, self.weight.square()).clamp(min=0.0)
            return float(squares.double().sqrt().sum())
        squares = torch.zeros((), dtype=torch.float64)
        size = prod(self.inputs)
        width = max(1, _AT_ONCE // size)
        for start in range(0, size, width):  # columns, whose squares add up to those of rows
            some = self(self._identity(start, min(start + width, size)))
            squares = squares + some.double().square().sum(0).cpu()
        return float(squares.sqrt().sum())

    def _identity(self, start: int, stop: int) -> Tensor:
        size = prod(self.inputs)
        index = torch.arange(stop - start, device=self.weight.device)
        rows = torch.zeros(stop - start, size, dtype=self.weight.dtype, device=self.weight.device)
        rows[index, index + start] = 1.0
        return rows.view(-1, *self.inputs)


def is_map(module: nn.Module) -> bool:
    """Whether `map_of` knows the module: a Linear layer, a convolution or a BatchNorm.

    Arguments:
        module: a layer.
    """
    return isinstance(module, nn.Linear | _ConvNd) or is_norm(module)


def is_norm(module: nn.Module) -> bool:
    """Whether the module is a BatchNorm.

    Arguments:
        module: a layer.
    """
    return isinstance(module, _BatchNorm)


def map_of(
    module: nn.Module,
    inputs: Sequence[int],
    weight: Tensor | None = None,
    scale: Tensor | None = None,
) -> LinearMap:
    """The linear map of a layer.

    Arguments:
        module: a Linear layer, a convolution, a transposed convolution or a BatchNorm; others
            raise.
        inputs: shape of one sample, without the batch's axis.
        weight: used instead of the module's own, of the same shape; for a BatchNorm ``[channels]``,
            its scale in evaluation mode.
        scale: ``[output channels]``, factors on the outputs, as a BatchNorm behind the layer has;
            ``None`` is 1. Not used for a BatchNorm itself.
    """
    w = getattr(module, "weight", None) if weight is None else weight
    inputs = tuple(inputs)
    if not isinstance(w, Tensor) or not is_map(module):
        raise SettingError(
            f"{type(module).__name__} is no linear map that is known: give a Linear layer or a "
            "convolution."
        )
    w = w.detach()
    if is_norm(module):
        return LinearMap(_scaled, w, inputs)
    if isinstance(module, _ConvTransposeNd):
        if scale is not None:  # w is [inputs, outputs / groups, …]
            each = scale.to(w).view(module.groups, 1, -1)
            each = each.expand(-1, module.in_channels // module.groups, -1)
            w = w * each.reshape(*w.shape[:2], *[1] * (w.dim() - 2))
        convolve: Any = getattr(F, f"conv_transpose{w.dim() - 2}d")
        settings = module.stride, module.padding, module.output_padding, module.groups
        dilation = module.dilation
        return LinearMap(lambda x, v: convolve(x, v, None, *settings, dilation), w, inputs)
    if scale is not None:
        w = w * scale.to(w).view(-1, *[1] * (w.dim() - 1))
    if isinstance(module, _ConvNd):
        forward: Any = module._conv_forward  # which pads as the module does
        plain = module.padding_mode == "zeros"
        return LinearMap(lambda x, v: forward(x, v, None), w, inputs, plain)
    return LinearMap(F.linear, w, inputs)


def _scaled(x: Tensor, scale: Tensor) -> Tensor:
    """``x_c -> scale_c x_c``, a diagonal matrix."""
    return x * scale.to(x).view(1, -1, *[1] * (x.dim() - 2))


def norm_scale(variance: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``γ / √(variance + ε)`` of a BatchNorm in evaluation mode, ``[channels]``.

    Arguments:
        variance: ``[channels]``, the running variance.
        weight: ``γ [channels]``; ``None`` is 1.
        eps: ``ε > 0``, the module's.
    """
    scale = (variance.detach() + eps).rsqrt()
    return scale if weight is None else scale * weight.detach()


def spectral_norm(layer: nn.Module, inputs: Sequence[int]) -> Number:
    """The largest singular value of a Linear layer or a convolution.

    Arguments:
        layer: a Linear layer, or a convolution with its padding and stride.
        inputs: shape of one sample, ``(features,)`` or ``(channels, height, width)``; of a
            convolution the result depends on it.
    """
    return map_of(layer, inputs).spectral_norm()
