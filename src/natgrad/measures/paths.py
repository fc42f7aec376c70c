"""What each operation does to sums over paths: ``Σ Π |w|^p`` in, ``Σ Π |w|^p`` out.

A tensor of such sums is never negative, so a ReLU passes it on. A weight enters as ``|w|^p``; other
operations have weights of their own, 1 for a maximum or a sum, ``1/k`` for a mean. Operations on
weights alone are left as they are.
"""

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from natgrad.errors import SettingError


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Say how numbers lie, move them or leave some out; then what is the identity above zero.
_AS_IT_IS = _names("""
    __get__ size dim ndimension numel stride is_floating_point is_complex is_contiguous get_device
    element_size storage_offset __len__ contiguous clone detach to double float type cpu cuda
    __getitem__ select narrow index_select unbind chunk split tensor_split
    view view_as reshape flatten unflatten squeeze unsqueeze expand expand_as broadcast_to
    permute transpose movedim moveaxis swapaxes t flip roll repeat tile repeat_interleave
    cat concat concatenate stack hstack vstack pixel_shuffle pixel_unshuffle channel_shuffle
    sum
    relu relu_ leaky_relu leaky_relu_ prelu rrelu
    dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout
""")
_LINEAR = _names("""
    linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
""")


class PathSums(Tensor):
    """Activations; ``power`` is that of the subclass that `along_paths` makes."""

    power: ClassVar[float]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        with torch._C.DisableTorchFunctionSubclass():
            rule = _RULES.get(name)
            if name in _LINEAR:
                found = cls._linear(func, *args, **(kwargs or {}))
            elif rule is not None:
                found = rule(cls, func, *args, **(kwargs or {}))
            elif name in _AS_IT_IS:
                found = func(*args, **(kwargs or {}))
            else:
                raise SettingError(
                    f"The path norm is of networks of linear layers, ReLU, BatchNorm, pooling and "
                    f"sums, but the model calls {name}: measure a part of it without that."
                )
            return cls._wrapped(found)

    @classmethod
    def _wrapped(cls, found: Any) -> Any:
        if isinstance(found, Tensor):
            return found.as_subclass(cls)
        if type(found) in (tuple, list):
            return type(found)(cls._wrapped(one) for one in found)
        return found

    @classmethod
    def weight(cls, w: Any, like: Tensor) -> Any:
        """``|w|^p`` of a tensor or a number; ``None`` stays.

        Arguments:
            w: a weight: a tensor or a number. Another activation raises, as there are no paths
                through a product of two.
            like: whose dtype and device the result of a tensor gets.
        """
        if w is None:
            return None
        if isinstance(w, PathSums):
            raise SettingError(
                "The path norm is of networks in which weights multiply activations, but the model "
                "multiplies two activations: measure a part of it without that."
            )
        if isinstance(w, Tensor):
            return w.to(like.device, like.dtype).abs().pow(cls.power)
        return abs(w) ** cls.power

    @classmethod
    def _linear(
        cls, func: Any, input: Tensor, weight: Tensor, bias: Any = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        w, b = cls.weight(weight, input), cls.weight(bias, input)
        found: Tensor = func(input, w, b, *args, **kwargs)
        return found


def along_paths(x: Tensor, power: float) -> Tensor:
    """``x``, of which a model makes sums over paths.

    Arguments:
        x: the inputs, of ones.
        power: ``p > 0``.
    """
    kind = type("PathSums", (PathSums,), {"power": power})
    found: Tensor = x.as_subclass(kind)
    return found


def plain(x: Tensor) -> Tensor:
    """The sums as a tensor like any other.

    Arguments:
        x: what a model has made of `along_paths`.
    """
    with torch._C.DisableTorchFunctionSubclass():
        found: Tensor = x.as_subclass(Tensor)
    return found


Kind = type[PathSums]


def _add(cls: Kind, func: Any, a: Any, b: Any, *, alpha: float = 1.0, **_: Any) -> Any:
    """Of two activations, or with a weight, which is a bias; a sign does not matter."""
    if not isinstance(a, PathSums):
        a, b = b, a
    if isinstance(b, PathSums):
        return a + abs(alpha) ** cls.power * b
    return a + abs(alpha) ** cls.power * cls.weight(b, a)


def _mul(cls: Kind, func: Any, a: Any, b: Any, **_: Any) -> Any:
    if not isinstance(a, PathSums):
        a, b = b, a
    return a * cls.weight(b, a)


def _div(cls: Kind, func: Any, a: Any, b: Any, **_: Any) -> Any:
    if not isinstance(a, PathSums):
        raise SettingError(
            "The path norm is of networks in which weights multiply activations, but the model "
            "divides by an activation: measure a part of it without that."
        )
    return a / cls.weight(b, a)


def _matmul(cls: Kind, func: Any, a: Any, b: Any) -> Any:
    if isinstance(a, PathSums):
        return a @ cls.weight(b, a)
    return cls.weight(a, b) @ b


def _batch_norm(
    cls: Kind,
    func: Any,
    input: Tensor,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training or running_mean is None:
        raise SettingError(
            "BatchNorm normalises by its batch, so that paths have no weights: call model.eval(), "
            "and let it keep running statistics."
        )
    scale = (running_var.to(input) + eps).rsqrt()
    scale = scale if weight is None else scale * weight.to(input)
    shift = -running_mean.to(input) * scale
    shift = shift if bias is None else shift + bias.to(input)
    shape = (1, -1, *[1] * (input.dim() - 2))
    slope: Tensor = cls.weight(scale, input)
    offset: Tensor = cls.weight(shift, input)
    return input * slope.view(shape) + offset.view(shape)


def _mean(cls: Kind, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    found: Tensor = func(x, *args, **kwargs)
    factor: float = (x.numel() / found.numel()) ** (1 - cls.power)
    return found * factor


def _max_pool(
    cls: Kind,
    func: Any,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    windows = _Windows(func, kernel_size, stride, padding, dilation)
    return windows.sums(input, func(input, kernel_size, stride, padding, dilation, ceil_mode))


def _avg_pool(
    cls: Kind,
    func: Any,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    *more: Any,
    **kwargs: Any,
) -> Tensor:
    """Weights differ between windows: of those at the border some look at padding."""
    windows, ones = _Windows(func, kernel_size, stride, padding, 1), torch.ones_like(plain(input))
    means = func(ones, kernel_size, windows.strides, padding, *more, **kwargs)
    each: Tensor = cls.weight(means / windows.sums(ones, means), input)
    return windows.sums(input, means) * each


def _adaptive(average: bool) -> Callable[..., Tensor]:
    def rule(cls: Kind, func: Any, input: Tensor, output_size: Any, *_: Any, **__: Any) -> Tensor:
        d = int(func.__name__[-2])
        found: Tensor = getattr(F, f"adaptive_avg_pool{d}d")(input, output_size)
        counts = torch.ones((), dtype=found.dtype, device=found.device)
        for axis in range(-d, 0):
            inputs, outputs = input.shape[axis], found.shape[axis]
            sizes = [
                ceil((i + 1) * inputs / outputs) - i * inputs // outputs for i in range(outputs)
            ]
            counts = counts * found.new_tensor(sizes).view(-1, *[1] * (-axis - 1))
        return found * counts.pow(1 - cls.power if average else 1)

    return rule


def _pad(
    cls: Kind, func: Any, input: Tensor, pad: Any, mode: str = "constant", value: Any = None
) -> Any:
    value = value if value is None else abs(value) ** cls.power
    return func(input, pad, mode, value)


class _Windows:
    """Of a pooling over the last axes."""

    def __init__(self, func: Any, kernel: Any, stride: Any, padding: Any, dilation: Any) -> None:
        self.axes = int(func.__name__[-2])
        self.kernels = self._each(kernel)
        self.strides = self.kernels if stride is None or stride == () else self._each(stride)
        self.paddings, self.dilations = self._each(padding), self._each(dilation)

    def _each(self, value: Any) -> tuple[int, ...]:
        if isinstance(value, Sequence):
            return tuple(value) * (self.axes if len(value) == 1 else 1)
        return (value,) * self.axes

    def sums(self, x: Tensor, like: Tensor) -> Tensor:
        """``[..., *out]`` for ``x [..., *in]``, where the pooling gives the shape of ``like``."""
        d = self.axes
        inside, outside = x.shape[-d:], like.shape[-d:]
        borders: list[int] = []
        for axis in reversed(range(d)):  # torch pads the last axis first
            reach = (outside[axis] - 1) * self.strides[axis] + 1
            reach += self.dilations[axis] * (self.kernels[axis] - 1)
            before = self.paddings[axis]
            borders += [before, max(0, reach - before - inside[axis])]
        flat = F.pad(x.reshape(-1, 1, *inside), borders)
        convolve = (F.conv1d, F.conv2d, F.conv3d)[d - 1]
        ones = flat.new_ones(1, 1, *self.kernels)
        found: Tensor = convolve(flat, ones, None, self.strides, 0, self.dilations)
        for axis in range(d):
            found = found.narrow(axis + 2, 0, outside[axis])
        return found.reshape(like.shape)


_RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("add", "add_", "__radd__", "sub", "sub_", "__rsub__", "rsub"), _add),
    **dict.fromkeys(("subtract", "maximum", "__add__", "__iadd__", "__sub__", "__isub__"), _add),
    **dict.fromkeys(("mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"), _mul),
    **dict.fromkeys(("div", "div_", "divide", "true_divide", "__truediv__", "__itruediv__"), _div),
    **dict.fromkeys(("__rtruediv__", "__rdiv__"), lambda cls, func, a, b: _div(cls, func, b, a)),
    **dict.fromkeys(("matmul", "__matmul__", "mm"), _matmul),
    "__rmatmul__": lambda cls, func, a, b: _matmul(cls, func, b, a),
    "batch_norm": _batch_norm,
    "mean": _mean,
    "pad": _pad,
    **{f"max_pool{d}d": _max_pool for d in (1, 2, 3)},
    **{f"avg_pool{d}d": _avg_pool for d in (1, 2, 3)},
    **{f"adaptive_avg_pool{d}d": _adaptive(True) for d in (1, 2, 3)},
    **{f"adaptive_max_pool{d}d": _adaptive(False) for d in (1, 2, 3)},
}
