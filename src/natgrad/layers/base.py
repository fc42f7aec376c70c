"""A module seen as one matrix ``W [rows, cols]``, the bias as its last column.

For sample ``n`` and shared position ``s`` (token, pixel) the module computes ``W a[n, s]``, and the
gradient of a sample is ``sum_s g[n, s] a[n, s]^T``. A layer says how to bring its tensors into this
form, and nothing else. Grouped layers are ``groups`` such matrices side by side.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from natgrad.linalg.forms import Form, Triangle

M = TypeVar("M", bound=nn.Module)
Read = Callable[[nn.Parameter], Tensor]

# Per-sample gradients are made for this many numbers at a time.
_PIECE = 1 << 24


class Layer(ABC, Generic[M]):
    """What every layer type shares; derive from ``SharedInput`` or ``Elementwise``."""

    normalises: ClassVar[bool] = False  # a norm layer: its damping is multiplied by norm_damping
    # Trailing axes of input and output that are not samples or positions; None: always batched.
    input_features: int | None = None
    output_features: int | None = None
    groups: int = 1
    batch_axis: int = 0

    def __init__(self, name: str, module: M) -> None:
        self.name = name
        self.module: M = module
        self.weight = trainable(getattr(module, "weight", None))
        self.bias = trainable(getattr(module, "bias", None))

    @property
    @abstractmethod
    def rows(self) -> int:
        """Output units of one group."""

    @property
    @abstractmethod
    def inputs_per_row(self) -> int:
        """Columns of the weight, without the bias."""

    @property
    def weight_cols(self) -> int:
        return self.inputs_per_row if self.weight is not None else 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(groups, rows, cols)``."""
        return self.groups, self.rows, self.weight_cols + (self.bias is not None)

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [p for p in (self.weight, self.bias) if p is not None]

    @property
    def kind(self) -> str:
        """The module's class, as the user wrote it: before ``fully_shard`` derived one from it."""
        classes = type(self.module).__mro__
        derived = [c for c in classes if any(b.__name__ == "FSDPModule" for b in c.__mro__)]
        return next(c.__name__ for c in classes if c not in derived)

    @property
    def claims(self) -> tuple[nn.Module, ...]:
        """Child modules whose parameters this layer stands for: they get no layer of their own."""
        return ()

    # Parameters as a matrix.

    def as_weight(self, m: Tensor) -> Tensor:
        """``m [groups, rows, weight_cols]`` -> a *view* with the shape of ``split(weight)``."""
        return m[0]

    def split(self, weight: Tensor) -> Tensor:
        """A weight-shaped tensor, or a view of it, in the shape that ``as_weight`` gives."""
        return weight

    def as_bias(self, bias: Tensor) -> Tensor:
        """A bias-shaped tensor as a view ``[groups, rows]``."""
        return bias.view(self.groups, self.rows)

    def load(self, out: Tensor, read: Read) -> None:
        """Write ``read(parameter)`` of each parameter into ``out [groups, rows, cols]``."""
        if self.weight is not None:
            self.as_weight(out[..., : self.weight_cols]).copy_(self.split(read(self.weight)))
        if self.bias is not None:
            out[..., -1].copy_(self.as_bias(read(self.bias)))

    def store(self, m: Tensor, read: Read) -> None:
        """The inverse of ``load``: write ``m [groups, rows, cols]`` into the tensors read."""
        if self.weight is not None:
            self.split(read(self.weight)).copy_(self.as_weight(m[..., : self.weight_cols]))
        if self.bias is not None:
            self.as_bias(read(self.bias)).copy_(m[..., -1])

    def region(self, parameter: nn.Parameter) -> tuple[tuple[int, int], ...]:
        """Which part of a parameter is this matrix: ``(first, end)`` of each dimension."""
        return tuple((0, size) for size in parameter.shape)

    # Data.

    def keep(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Any:
        """What the backward pass will need of a forward call: the input, samples in front."""
        x: Tensor = args[0] if args else next(iter(kwargs.values()))
        return self.samples_first(x.detach(), self.input_features)

    def arrange(self, g: Tensor) -> Tensor:
        """The gradient of the module's output, samples in front."""
        return self.samples_first(g, self.output_features)

    def samples_first(self, t: Tensor, features: int | None) -> Tensor:
        """``t`` with the samples' axis in front; an unbatched tensor is one sample."""
        if features is None:
            return t
        if t.ndim == features:
            return t.unsqueeze(0)
        if self.batch_axis and t.ndim > features + self.batch_axis:
            return t.movedim(self.batch_axis, 0)
        return t

    @abstractmethod
    def sample_gradients(self, x: Any, g: Tensor, samples: int | None) -> Iterator[Tensor]:
        """Per-sample gradients ``[n, groups, rows, cols]``, a piece of the samples at a time."""


class SharedInput(Layer[M]):
    """All rows of a group see the same input, so Kronecker factors exist (Linear, Conv)."""

    input_is_rows: ClassVar[bool] = False  # ``a`` is the input itself: layers on one input share A

    @abstractmethod
    def inputs(self, x: Any) -> Tensor:
        """What ``keep`` kept -> ``a [n, s, inputs]`` (``[groups, n, s, inputs]`` with groups)."""

    @abstractmethod
    def gradients(self, g: Tensor) -> Tensor:
        """Gradient of the module's output -> ``[n, s, rows]`` (``[groups, n, s, rows]``)."""

    def input_form(self) -> Form:
        return Triangle(self.shape[2], self.groups)

    def gradient_form(self) -> Form:
        return Triangle(self.rows, self.groups)

    def add_inputs(self, x: Any, form: Form, kept: Tensor) -> int:
        """``kept += sum_{n,s} a a^T``; returns the number of positions ``n * s``."""
        assert isinstance(form, Triangle)
        a = self.weight_inputs(x, kept.dtype).flatten(1, 2)
        form.add_rows(kept, a)
        return a.shape[1]

    def add_gradients(self, x: Any, g: Tensor, form: Form, kept: Tensor) -> None:
        """``kept += sum_{n,s} g g^T``."""
        assert isinstance(form, Triangle)
        form.add_rows(kept, grouped(self.gradients(g)).to(kept.dtype).flatten(1, 2))

    def weight_inputs(self, x: Any, dtype: torch.dtype) -> Tensor:
        """``[groups, n, s, weight_cols]``: no column at all if only the bias is trained."""
        return grouped(self.inputs(x)).to(dtype)[..., : self.weight_cols]

    def with_ones(self, a: Tensor) -> Tensor:
        """``a [..., weight_cols]`` -> ``[..., cols]``."""
        return a if self.bias is None else torch.cat([a, a.new_ones(*a.shape[:-1], 1)], -1)

    def position_sums(
        self, x: Any, g: Tensor, samples: int | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, int | Tensor]:
        """``sum_s a [groups, n, cols]``, ``sum_s g [groups, n, rows]`` and the number of positions,
        ``[1, n, 1]`` where samples differ in it."""
        a = per_sample(self.weight_inputs(x, dtype), samples)
        positions = a.shape[2]
        total = a.sum(2)
        if self.bias is not None:
            total = torch.cat([total, total.new_full((*total.shape[:-1], 1), positions)], -1)
        return total, per_sample(grouped(self.gradients(g)).to(dtype), samples).sum(2), positions

    def pairs(self, x: Any, g: Tensor, samples: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        """``a [groups, n, s, cols]`` and ``g [groups, n, s, rows]``, a piece of samples at a time.

        Both are products of the whole, so ``sum_s g a^T`` of a piece are its samples' gradients.
        """
        n = len(g)
        fold = n // samples if samples and n % samples == 0 else 1
        count = fold * piece(self.shape)
        for i in range(0, n, count):
            part, own = g[i : i + count], min(count, n - i) // fold
            a = self.with_ones(self.weight_inputs(x[i : i + count], real(g.dtype)))
            gs = grouped(self.gradients(part)).to(a.dtype)
            yield per_sample(a, own), per_sample(gs, own)

    def sample_gradients(self, x: Any, g: Tensor, samples: int | None) -> Iterator[Tensor]:
        for a, gs in self.pairs(x, g, samples):
            yield torch.einsum("bnsr,bnsc->nbrc", gs, a)


class Elementwise(Layer[M]):
    """Every row has an input of its own (norm layers): ``y[r] = weight[r] x_hat[r] + bias[r]``."""

    normalises = True
    inputs_per_row = 1

    def as_weight(self, m: Tensor) -> Tensor:
        return m[0, :, 0]

    def split(self, weight: Tensor) -> Tensor:
        return weight.view(-1)

    @abstractmethod
    def normalised(self, x: Any) -> Tensor:
        """What ``keep`` kept -> ``x_hat [n, s, rows]``."""

    @abstractmethod
    def gradients(self, g: Tensor) -> Tensor:
        """Gradient of the module's output -> ``[n, s, rows]``."""

    def pixel_sums(self, x: Any, g: Tensor, samples: int | None) -> tuple[Tensor, Tensor]:
        """``sum_s g x_hat`` and ``sum_s g`` of every sample, ``[n, rows]`` each."""
        grads = self.gradients(g).to(real(g.dtype))
        products = self.normalised(x).to(grads.dtype) * grads
        of_weight, of_bias = (per_sample(t[None], samples)[0].sum(1) for t in (products, grads))
        return of_weight, of_bias

    def sample_gradients(self, x: Any, g: Tensor, samples: int | None) -> Iterator[Tensor]:
        sums = self.pixel_sums(x, g, samples)
        used = [t for p, t in zip((self.weight, self.bias), sums, strict=True) if p is not None]
        yield torch.stack(used, -1).unsqueeze(1)


def piece(shape: tuple[int, int, int]) -> int:
    """How many samples' gradients are made at a time: the same for all uses of one weight."""
    groups, rows, cols = shape
    return max(1, _PIECE // max(1, groups * rows * cols))


def trainable(p: Any) -> nn.Parameter | None:
    return p if isinstance(p, nn.Parameter) and p.requires_grad else None


def real(dtype: torch.dtype) -> torch.dtype:
    """Statistics of half-precision tensors are made in float32."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def grouped(t: Tensor) -> Tensor:
    """``[n, s, d]`` -> ``[1, n, s, d]``; grouped tensors stay as they are."""
    return t.unsqueeze(0) if t.ndim == 3 else t


def per_sample(t: Tensor, samples: int | None) -> Tensor:
    """``t [groups, n, s, d]`` with positions that were folded into ``n`` taken out again.

    A model that flattens ``[samples, tokens, d]`` to ``[samples * tokens, d]`` still has that many
    samples. A leading size that is no multiple of their number is taken as it is.
    """
    n = t.shape[1]
    if not samples or n == samples or n % samples:
        return t
    return t.reshape(t.shape[0], samples, n // samples * t.shape[2], t.shape[3])
