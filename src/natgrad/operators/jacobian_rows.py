"""The rows ``J_nᵀ v_nq`` of a batch, kept as inputs and gradients of layers, not multiplied out.

For a layer they are ``Σ_s g[n, q, s] a[n, s]ᵀ``. Running the model for every product would cost a
forward and a backward pass each, layer after layer. Rows are made once; a product with G then costs
two matrix products a layer, and layers do not wait for each other. The same rows give the Gram
matrix ``J Jᵀ``, and with it the whole spectrum that is not zero.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from natgrad.layers import Layer, SharedInput
from natgrad.layers.axes import grouped, per_sample
from natgrad.layers.embedding import Embedding, TiedHead
from natgrad.operators.data import Batch
from natgrad.operators.problem import Problem
from natgrad.operators.tape import Tape, positions
from natgrad.operators.vectors import Vectors


@dataclass
class Factored:
    """The rows of a layer with shared inputs, as the factors of ``Σ_s g aᵀ``.

    Arguments:
        a: ``[b, n * s, c]``, inputs of the layer's ``b`` groups at ``s`` positions of ``n``
            samples; ``c`` columns, with the ones of a bias.
        g: ``[n, q, b * s * r]``, gradients of the layer's output for ``q`` vectors a sample.
        index: ``[b * c * r]``, where the entries lie in a flat vector, columns before rows.
        groups: ``b``.
        rows: ``r``, output units of one group.
        plain: where the weight and the bias (``None`` without one) start in a flat vector, if both
            lie there without gaps and row by row; ``None`` where they do not.
    """

    a: Tensor
    g: Tensor
    index: Tensor
    groups: int
    rows: int
    # Where the weight begins, and the bias if there is one, if they lie in a flat vector as they
    # do in the matrix: then a single vector needs no index.
    plain: tuple[int, int | None] | None = None

    @property
    def positions(self) -> int:
        return self.a.shape[1] // len(self.g)

    def _split_samples(self, t: Tensor) -> Tensor:
        """``[b, n * s, r * k]`` -> ``[n, b * s * r, k]``."""
        n, s = len(self.g), self.positions
        if self.groups == 1:
            return t.view(n, s * self.rows, -1)
        return t.view(self.groups, n, s * self.rows, -1).transpose(0, 1).flatten(1, 2)

    def _join_samples(self, t: Tensor) -> Tensor:
        """The inverse of ``_split_samples``."""
        n, s = len(self.g), self.positions
        if self.groups == 1:
            return t.reshape(1, n * s, -1)
        return t.view(n, self.groups, s, -1).transpose(0, 1).reshape(self.groups, n * s, -1)

    def forward(self, v: Tensor) -> Tensor:
        """``R v``, ``[n, q, k]``.

        Arguments:
            v: ``[P, k]``.
        """
        if self.plain is not None and v.shape[1] == 1:
            return torch.bmm(self.g, self._split_samples(self._one(v[:, 0]).unsqueeze(0)))
        m = v[self.index].view(self.groups, self.a.shape[2], -1)  # [b, c, r * k]
        return torch.bmm(self.g, self._split_samples(torch.bmm(self.a, m)))

    def _parts(self, flat: Tensor) -> tuple[Tensor, Tensor | None]:
        """Views of weight ``[r, c]`` and bias ``[r]`` in a flat vector."""
        assert self.plain is not None
        start, bias = self.plain
        cols = self.a.shape[2] - (bias is not None)
        weight = flat[start : start + self.rows * cols].view(self.rows, cols)
        return weight, None if bias is None else flat[bias : bias + self.rows]

    def _one(self, flat: Tensor) -> Tensor:
        """``[n * s, r]``."""
        weight, bias = self._parts(flat)
        a = self.a[0, :, : weight.shape[1]]
        return a @ weight.mT if bias is None else torch.addmm(bias, a, weight.mT)

    def backward(self, u: Tensor, out: Tensor) -> None:
        """``out += Rᵀ u``.

        Arguments:
            u: ``[n, q, k]``.
            out: ``[P, k]``, added to.
        """
        z = self._join_samples(torch.bmm(self.g.mT, u))
        if self.plain is not None and u.shape[2] == 1:
            weight, bias = self._parts(out[:, 0])
            weight.addmm_(z[0].mT, self.a[0, :, : weight.shape[1]])
            if bias is not None:
                bias += z[0].sum(0)
            return
        d = torch.bmm(self.a.mT, z)  # [b, c, r * k]
        out[self.index] += d.view(len(self.index), -1)

    def explicit(self) -> Tensor:
        """``[n, q, b * c * r]``."""
        n, q, _ = self.g.shape
        s = self.positions
        a = self.a.view(self.groups, n, s, -1)
        g = self.g.view(n, q, self.groups, s, self.rows)
        return torch.einsum("bnsc,nqbsr->nqbcr", a, g).flatten(2)

    def gram(self, other: "Factored | Explicit") -> Tensor:
        """``[n * q, m * q]`` with the ``m`` samples of another batch.

        Arguments:
            other: rows of the same layer in another batch.
        """
        assert isinstance(other, Factored)
        if self.positions > 1 or other.positions > 1 or self.groups > 1:
            return self.explicit().flatten(0, 1) @ other.explicit().flatten(0, 1).mT
        (n, q, _), m = self.g.shape, len(other.g)
        products = self.g.flatten(0, 1) @ other.g.flatten(0, 1).mT
        inputs = self.a[0] @ other.a[0].mT  # [n, m]
        return (products.view(n, q, m, q) * inputs.view(n, 1, m, 1)).view(n * q, m * q)


@dataclass
class Explicit:
    """The rows of a layer without shared inputs, written out; they are small.

    Arguments:
        values: ``[n, q, size]``.
        index: ``[size]``, where the entries lie in a flat vector.
    """

    values: Tensor
    index: Tensor

    def forward(self, v: Tensor) -> Tensor:
        """``R v``, ``[n, q, k]``.

        Arguments:
            v: ``[P, k]``.
        """
        return self.values @ v[self.index]

    def backward(self, u: Tensor, out: Tensor) -> None:
        """``out += Rᵀ u``.

        Arguments:
            u: ``[n, q, k]``.
            out: ``[P, k]``, added to.
        """
        out[self.index] += torch.einsum("nqp,nqk->pk", self.values, u)

    def explicit(self) -> Tensor:
        return self.values

    def gram(self, other: "Factored | Explicit") -> Tensor:
        """``[n * q, m * q]`` with the ``m`` samples of another batch.

        Arguments:
            other: rows of the same layer in another batch.
        """
        assert isinstance(other, Explicit)
        return self.values.flatten(0, 1) @ other.values.flatten(0, 1).mT


class JacobianRows:
    """The rows of one batch, layer by layer.

    Arguments:
        parts: one for each use of a layer.
        samples: ``n``.
        each: ``q``, rows of a sample.
        size: ``P``, the number of parameters.
        shared: whether some weight is in several parts, whose rows then add up.
    """

    def __init__(
        self,
        parts: list[Factored | Explicit],
        samples: int,
        each: int,
        size: int,
        shared: bool,
    ) -> None:
        self.parts, self.samples, self.each, self.size = parts, samples, each, size
        self.shared = shared

    @property
    def numel(self) -> int:
        return sum(
            p.a.numel() + p.g.numel() if isinstance(p, Factored) else p.values.numel()
            for p in self.parts
        )

    def widest(self) -> int:
        """Numbers of intermediate results of a product with one vector."""
        return max(
            p.g.shape[2] * self.samples if isinstance(p, Factored) else p.values.shape[2]
            for p in self.parts
        )

    def forward(self, v: Tensor) -> Tensor:
        """``R v``, ``[n, q, k]``.

        Arguments:
            v: ``[P, k]``.
        """
        out = self.parts[0].forward(v)
        for part in self.parts[1:]:
            out += part.forward(v)
        return out

    def backward(self, u: Tensor, out: Tensor) -> None:
        """``out += Rᵀ u``.

        Arguments:
            u: ``[n, q, k]``.
            out: ``[P, k]``, added to.
        """
        for part in self.parts:
            part.backward(u, out)

    def explicit(self) -> Tensor:
        """``[n * q, P]``."""
        first = self.parts[0].explicit()
        out = first.new_zeros(self.samples, self.each, self.size)
        for part in self.parts:
            out[:, :, part.index] += part.explicit()
        return out.flatten(0, 1)

    def gram(self, other: "JacobianRows") -> Tensor:
        """``R Sᵀ [n * q, m * q]`` with the rows of another batch, or of this one.

        Arguments:
            other: those rows.
        """
        if self.shared or other.shared:
            return self.explicit() @ other.explicit().mT
        pairs = zip(self.parts, other.parts, strict=True)
        total = self.parts[0].gram(other.parts[0])
        next(pairs)
        for one, two in pairs:
            total += one.gram(two)
        return total


def gather(
    problem: Problem, tape: Tape, vectors: Vectors, batch: Batch, index: int
) -> JacobianRows:
    """The rows of one batch, by one forward pass and a backward pass for some vectors at a time.

    Arguments:
        problem: model, loss and data.
        tape: with its hooks on (entered as a context).
        vectors: which output vectors are pulled back through the network.
        batch: whose rows are wanted.
        index: number of the batch within a pass over the data, which fixes what is drawn at random
            for it.
    """
    output = tape.forward(batch)
    found: dict[int, tuple[Any, Any, list[Tensor]]] = {}
    for stack in vectors.stacks(problem.loss, output, batch, index):
        for number, (use, x, gs) in enumerate(tape.backpropagate(output, stack)):
            found.setdefault(number, (use, x, []))[2].extend(gs)
    where = {block: positions(problem, block) for block in tape.blocks}
    parts: list[Factored | Explicit] = []
    for (block, layer), x, gs in found.values():
        parts.append(_part(layer, x, gs, where[block], block.shape, batch.samples))
    shared = len({use[0] for use, _, _ in found.values()}) < len(parts)
    each = len(next(iter(found.values()))[2])
    return JacobianRows(parts, batch.samples, each, problem.space.size, shared)


def _part(
    layer: Layer[Any],
    x: Any,
    gs: list[Tensor],
    index: Tensor,
    shape: tuple[int, int, int],
    samples: int,
) -> Factored | Explicit:
    dtype = gs[0].dtype
    if not isinstance(layer, SharedInput) or isinstance(layer, Embedding | TiedHead):
        each = [torch.cat(list(layer.sample_gradients(x, g, samples))).flatten(1) for g in gs]
        return Explicit(torch.stack(each, 1), index)
    groups, rows, cols = shape
    a = per_sample(layer.with_ones(layer.weight_inputs(x, dtype)), samples)  # [b, n, s, c]
    g = torch.stack([per_sample(grouped(layer.gradients(one)).to(dtype), samples) for one in gs])
    g = g.permute(2, 0, 1, 3, 4).flatten(2).contiguous()  # [q, b, n, s, r] -> [n, q, bsr]
    matrix = index.view(groups, rows, cols)
    turned = matrix.transpose(1, 2).flatten()
    plain = _plain(matrix, layer) if groups == 1 else None
    return Factored(a.flatten(1, 2).contiguous(), g, turned, groups, rows, plain)


def _plain(matrix: Tensor, layer: Layer[Any]) -> tuple[int, int | None] | None:
    """``matrix [1, rows, cols]`` of places in a flat vector: where weight and bias begin."""
    cols = matrix.shape[2] - (layer.bias is not None)
    weight, bias = matrix[0, :, :cols].flatten(), matrix[0, :, cols:].flatten()
    if not len(weight) or any(bool((part.diff() != 1).any()) for part in (weight, bias)):
        return None
    return int(weight[0]), int(bias[0]) if len(bias) else None
