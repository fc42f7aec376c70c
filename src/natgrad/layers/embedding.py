"""``nn.Embedding``: a linear layer on one-hot inputs, stored transposed, ``W [dim, entries]``.

Its A is diagonal: the share of positions that look each entry up. It is kept as counts, so that a
vocabulary of any size costs one number an entry.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from natgrad.layers.axes import grouped, per_sample, piece
from natgrad.layers.base import SharedInput, real
from natgrad.layers.linear import RowInputs
from natgrad.layers.registry import NotCovered, register
from natgrad.linalg.forms import DiagonalForm, Form, RowForm


@register(nn.Embedding)
class Embedding(SharedInput[nn.Embedding]):
    input_features, output_features = 0, 1

    def __init__(self, name: str, module: nn.Embedding) -> None:
        super().__init__(name, module)
        if module.sparse:
            raise NotCovered("its gradient is sparse (sparse=True)")
        if module.scale_grad_by_freq:
            raise NotCovered("scale_grad_by_freq=True makes its gradient depend on the batch")

    @property
    def rows(self) -> int:
        return self.module.embedding_dim

    @property
    def inputs_per_row(self) -> int:
        return self.module.num_embeddings

    def split(self, weight: Tensor) -> Tensor:
        return weight.mT

    def input_form(self) -> Form:
        return DiagonalForm(self.module.num_embeddings)

    def _indices(self, x: Tensor) -> Tensor:
        """``[n, s]``."""
        return x.unsqueeze(1) if x.ndim == 1 else x.flatten(1)

    def _used(self, x: Tensor) -> Tensor | None:
        """Which of ``_indices`` receive a gradient; ``None`` if all do."""
        padding = self.module.padding_idx
        return None if padding is None else self._indices(x) != padding

    def inputs(self, x: Tensor) -> Tensor:
        one_hot = F.one_hot(self._indices(x), self.module.num_embeddings)
        used = self._used(x)
        return one_hot if used is None else one_hot * used.unsqueeze(-1)

    def gradients(self, g: Tensor) -> Tensor:
        return g.unsqueeze(1) if g.ndim == 2 else g.flatten(1, -2)

    def add_inputs(self, x: Tensor, form: Form, kept: Tensor) -> int:
        indices, used = self._indices(x), self._used(x)
        if used is not None:
            indices = indices[used]
        kept += torch.bincount(indices.flatten(), minlength=form.dim)
        return indices.numel()

    def add_gradients(self, x: Tensor, g: Tensor, form: Form, kept: Tensor) -> None:
        assert isinstance(form, RowForm)
        rows, used = self.gradients(g).to(form.operand_dtype(g, kept)), self._used(x)
        rows = rows.flatten(0, 1) if used is None else rows[used]
        form.add_rows(kept, rows.unsqueeze(0))

    def position_sums(
        self, x: Tensor, g: Tensor, samples: int | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, int | Tensor]:
        # One-hot sums are counts; padding has no gradient, so it is no position at all.
        total = per_sample(grouped(self.inputs(x)).to(dtype), samples).sum(2)
        gs = grouped(self.gradients(g)).to(dtype)
        if (used := self._used(x)) is not None:
            gs = gs * used.unsqueeze(-1)
        return total, per_sample(gs, samples).sum(2), total.sum(2, keepdim=True)

    def sample_gradients(self, x: Tensor, g: Tensor, samples: int | None) -> Iterator[Tensor]:
        # As a sum per looked-up entry: the one-hot product would multiply mostly zeros.
        dtype = real(g.dtype)
        indices = per_sample(self._indices(x)[None, :, :, None], samples)[0, ..., 0]  # [n, s]
        gs = per_sample(grouped(self.gradients(g)).to(dtype), samples)[0]  # [n, s, dim]
        if (padding := self.module.padding_idx) is not None:
            gs = gs * (indices != padding).unsqueeze(-1)
        count = piece(self.shape)
        for i in range(0, len(gs), count):
            part, where = gs[i : i + count], indices[i : i + count]
            out = part.new_zeros(len(part), self.module.num_embeddings, self.rows)
            out.scatter_add_(1, where.unsqueeze(-1).expand_as(part), part)
            yield out.mT.unsqueeze(1)


class TiedHead(RowInputs):
    """A ``Linear`` whose weight ``[entries, dim]`` is an embedding's: the same matrix, transposed.

    In the embedding's ``W [dim, entries]`` the roles change places: the input of the linear layer
    runs over W's rows, the gradient of its output over W's columns.
    """

    transposed = True

    module: nn.Linear
    inputs_per_row = 0
    input_is_rows = False  # its input is no row of A

    def __init__(self, name: str, module: nn.Linear) -> None:
        super().__init__(name, module)
        self.bias = None  # it would be a further row of W, which the embedding does not have

    @property
    def rows(self) -> int:
        return self.module.in_features

    @property
    def shape(self) -> tuple[int, int, int]:
        return 1, self.module.in_features, self.module.out_features

    def weight_inputs(self, x: Any, dtype: torch.dtype) -> Tensor:
        return grouped(self.inputs(x)).to(dtype)  # over W's rows, so none of its columns are cut

    def pairs(self, x: Any, g: Tensor, samples: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        dtype = real(g.dtype)
        rows = per_sample(grouped(self.inputs(x)).to(dtype), samples)
        cols = per_sample(grouped(self.gradients(g)).to(dtype), samples)
        count = piece(self.shape)
        for i in range(0, rows.shape[1], count):
            yield cols[:, i : i + count], rows[:, i : i + count]
