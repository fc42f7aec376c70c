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

from natgrad.layers.axes import grouped, per_sample, piece
from natgrad.layers.axes import real as real
from natgrad.layers.axes import trainable as trainable
from natgrad.linalg.forms import Form, RowForm, Triangle

M = TypeVar("M", bound=nn.Module)
Read = Callable[[nn.Parameter], Tensor]


class Layer(ABC, Generic[M]):
    """What every layer type shares; derive from `SharedInput` or `Elementwise`.

    Arguments:
        name: of the module in the model, as `named_modules` has it.
        module: its ``weight`` and ``bias``, those that require gradients, become the matrix.
    """

    normalises: ClassVar[bool] = False  # a norm layer: its damping is multiplied by norm_damping
    # A tied head: it uses the embedding's W transposed, with its inputs where gradients are.
    transposed: ClassVar[bool] = False
    prefers_diagonal: bool = False  # unless a structure of whole gradients is asked for
    # Trailing axes of input and output that are not samples or positions; None: always batched.
    input_features: int | None = None
    output_features: int | None = None
    groups: int = 1
    batch_axis: int = 0
    axis_given: bool = False  # whether the user said so; otherwise batches may show another one
    call: Any = None  # the function of the module that is watched, `natgrad.layers.called.Call`

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
        """``m [groups, rows, weight_cols]`` -> a *view* with the shape of ``split(weight)``.

        Arguments:
            m: ``[groups, rows, weight_cols]``.
        """
        return m[0]

    def split(self, weight: Tensor) -> Tensor:
        """A weight-shaped tensor, or a view of it, in the shape that ``as_weight`` gives.

        Arguments:
            weight: shaped like the module's weight.
        """
        return weight

    def as_bias(self, bias: Tensor) -> Tensor:
        """A bias-shaped tensor as a view ``[groups, rows]``.

        Arguments:
            bias: shaped like the module's bias.
        """
        return bias.view(self.groups, self.rows)

    def as_bias_shape(self, m: Tensor) -> Tensor:
        """The last column of a matrix as a *view* with the shape of ``as_bias``.

        Arguments:
            m: ``[groups, rows]``.
        """
        return m

    def load(self, out: Tensor, read: Read) -> None:
        """Write a tensor for each parameter, such as its gradient, into a matrix.

        Arguments:
            out: ``[groups, rows, cols]``, overwritten.
            read: from a parameter to the tensor that is read, of the parameter's shape.
        """
        if self.weight is not None:
            self.as_weight(out[..., : self.weight_cols]).copy_(self.split(read(self.weight)))
        if self.bias is not None:
            self.as_bias_shape(out[..., -1]).copy_(self.as_bias(read(self.bias)))

    def store(self, m: Tensor, read: Read) -> None:
        """The inverse of ``load``.

        Arguments:
            m: ``[groups, rows, cols]``.
            read: from a parameter to the tensor, of the parameter's shape, that is overwritten in
                place.
        """
        if self.weight is not None:
            self.split(read(self.weight)).copy_(self.as_weight(m[..., : self.weight_cols]))
        if self.bias is not None:
            self.as_bias(read(self.bias)).copy_(self.as_bias_shape(m[..., -1]))

    def region(self, parameter: nn.Parameter) -> tuple[tuple[int, int], ...]:
        """Which part of a parameter is this matrix: ``(first, end)`` of each dimension, one more
        where `unfolding` makes two of one.

        Arguments:
            parameter: one of the layer's.
        """
        return tuple((0, size) for size in parameter.shape)

    def unfolding(self, parameter: nn.Parameter) -> tuple[int, int] | None:
        """Where the rows of several matrices follow each other in turn: the axis of a parameter
        that `region` sees as two, ``(outer, unit)``, and the unit; ``None`` if there is none.

        Arguments:
            parameter: one of the layer's.
        """
        return None

    # Data.

    def keep(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Any:
        """What the backward pass will need of a forward call: the input, samples in front.

        Arguments:
            args: positional arguments of the module's forward call; the first is its input.
            kwargs: its keyword arguments, of which the first is the input where there are no
                positional ones.
            out: its result, of which only layers that need its shape or its graph make use.
        """
        x: Tensor = args[0] if args else next(iter(kwargs.values()))
        return self.samples_first(x.detach(), self.input_features)

    def arrange(self, g: Tensor) -> Tensor:
        """The gradient of the module's output, samples in front.

        Arguments:
            g: as autograd gives it, shaped like the module's output.
        """
        return self.samples_first(g, self.output_features)

    def some(self, x: Any, rows: Tensor) -> Any:
        """What `keep` kept, of some rows alone; ``None`` if they cannot be told apart.

        Arguments:
            x: what `keep` kept of a forward call, samples in front.
            rows: numbers of rows of the leading axis, ascending.
        """
        return x.index_select(0, rows) if isinstance(x, Tensor) else None

    def count(self, x: Any) -> int:
        """The samples in an input, as far as its leading size tells.

        Arguments:
            x: the first argument of a forward call.
        """
        features = self.input_features
        if not isinstance(x, Tensor) or x.ndim == (features or 0):
            return 1
        moved = features is not None and x.ndim > features + self.batch_axis
        return int(x.shape[self.batch_axis if moved else 0])

    def samples_first(self, t: Tensor, features: int | None) -> Tensor:
        """A tensor with the samples' axis in front; an unbatched tensor is one sample.

        Arguments:
            t: an input or a gradient.
            features: number of trailing axes that are neither samples nor positions; a tensor of
                just these is one sample. ``None`` leaves ``t`` as it is.
        """
        if features is None:
            return t
        if t.ndim == features:
            return t.unsqueeze(0)
        if self.batch_axis and t.ndim > features + self.batch_axis:
            return t.movedim(self.batch_axis, 0)
        return t

    @abstractmethod
    def sample_gradients(self, x: Any, g: Tensor, samples: int | None) -> Iterator[Tensor]:
        """Per-sample gradients ``[n, groups, rows, cols]``, some samples at a time.

        Arguments:
            x: what `keep` kept of a forward call, ``n`` samples.
            g: gradient of the module's output, samples in front.
            samples: number of samples that the model was called with; ``None`` is not known. Where
                the leading axis is a multiple of it, positions are folded into that axis and are
                taken out again.
        """


class SharedInput(Layer[M]):
    """All rows of a group see the same input, so Kronecker factors exist (Linear, Conv)."""

    input_is_rows: ClassVar[bool] = False  # ``a`` is the input itself: layers on one input share A

    @abstractmethod
    def inputs(self, x: Any) -> Tensor:
        """What ``keep`` kept -> ``a [n, s, inputs]`` (``[groups, n, s, inputs]`` with groups).

        Arguments:
            x: what `keep` kept of a forward call, ``n`` samples.
        """

    @abstractmethod
    def gradients(self, g: Tensor) -> Tensor:
        """Gradient of the module's output -> ``[n, s, rows]`` (``[groups, n, s, rows]``).

        Arguments:
            g: gradient of the module's output, samples in front.
        """

    def input_form(self) -> Form:
        return Triangle(self.shape[2], self.groups)

    def gradient_form(self) -> Form:
        return Triangle(self.rows, self.groups)

    def add_inputs(self, x: Any, form: Form, kept: Tensor) -> int:
        """``kept += sum_{n,s} a a^T``; returns the number of positions ``n * s``.

        Arguments:
            x: what `keep` kept of a forward call, ``n`` samples.
            form: how A is kept, as `input_form` gives it, or less of it.
            kept: flat buffer of ``form``, added to in place. The column of ones of a bias is left
                to the form.
        """
        assert isinstance(form, RowForm)
        a = self.weight_inputs(x, form.operand_dtype(x, kept)).flatten(1, 2)
        form.add_rows(kept, a)
        return a.shape[1]

    def add_gradients(self, x: Any, g: Tensor, form: Form, kept: Tensor) -> None:
        """``kept += sum_{n,s} g g^T``.

        Arguments:
            x: what `keep` kept of the forward call; only layers in which inputs say which gradients
                count look at it.
            g: gradient of the module's output, samples in front.
            form: how G is kept, as `gradient_form` gives it, or less of it.
            kept: flat buffer of ``form``, added to in place.
        """
        assert isinstance(form, RowForm)
        rows = grouped(self.gradients(g)).to(form.operand_dtype(g, kept))
        form.add_rows(kept, rows.flatten(1, 2))

    def weight_inputs(self, x: Any, dtype: torch.dtype) -> Tensor:
        """``[groups, n, s, weight_cols]``: no column at all if only the bias is trained.

        Arguments:
            x: what `keep` kept of a forward call, ``n`` samples.
            dtype: of the result.
        """
        return grouped(self.inputs(x)).to(dtype)[..., : self.weight_cols]

    def with_ones(self, a: Tensor) -> Tensor:
        """Append the column of ones that the bias multiplies: ``[..., cols]``.

        Arguments:
            a: ``[..., weight_cols]``.
        """
        return a if self.bias is None else torch.cat([a, a.new_ones(*a.shape[:-1], 1)], -1)

    def position_sums(
        self, x: Any, g: Tensor, samples: int | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, int | Tensor]:
        """``sum_s a [groups, n, cols]``, ``sum_s g [groups, n, rows]`` and the number of positions,
        ``[1, n, 1]`` where samples differ in it.

        Arguments:
            x: what `keep` kept of a forward call, ``n`` samples.
            g: gradient of the module's output, samples in front.
            samples: number of samples that the model was called with; ``None`` is not known. Where
                the leading axis is a multiple of it, positions are folded into that axis and are
                taken out again.
            dtype: in which they are summed.
        """
        a = per_sample(self.weight_inputs(x, dtype), samples)
        positions = a.shape[2]
        total = a.sum(2)
        if self.bias is not None:
            total = torch.cat([total, total.new_full((*total.shape[:-1], 1), positions)], -1)
        return total, per_sample(grouped(self.gradients(g)).to(dtype), samples).sum(2), positions

    def pairs(self, x: Any, g: Tensor, samples: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        """``a [groups, n, s, cols]`` and ``g [groups, n, s, rows]``, some samples at a time: the
        per-sample gradients are ``sum_s g a^T``.

        Arguments:
            x: what `keep` kept of a forward call, ``n`` samples.
            g: gradient of the module's output, samples in front.
            samples: number of samples that the model was called with; ``None`` is not known. Where
                the leading axis is a multiple of it, positions are folded into that axis and are
                taken out again.
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
