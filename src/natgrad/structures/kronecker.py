"""``F = G x A`` per layer (Osawa 2019, eq. 5): inputs and output gradients are averaged apart.

The block is ``1/N sum_n vec(dW_n) vec(dW_n)^T`` with ``dW_n = sum_s g[n,s] a[n,s]^T``. Taking ``a``
and ``g`` as independent makes it a product of ``A [cols, cols]`` and ``G [rows, rows]`` (Martens &
Grosse 2015). What positions ``s`` are is a choice (Eschenhagen et al. 2023):

expand:  ``A = 1/(N S) sum_{n,s} a a^T``,          ``G = 1/N sum_{n,s} g g^T``
reduce:  ``A = 1/N sum_n mean_s(a) mean_s(a)^T``,  ``G = 1/N sum_n sum_s(g) sum_s(g)^T``
traces:  ``A = 1/N sum_n dW_n^T dW_n / tr F``,      ``G = 1/N sum_n dW_n dW_n^T``

All count positions once, so that ``G x A`` has the scale of the block itself. The last takes no two
positions for alike (`natgrad.structures.traces`).

A side that is too wide to be decomposed is kept in diagonal blocks, or as a diagonal alone
(``input_block``, ``gradient_block``); `narrowed` chooses them for layers above a limit.

A tied embedding and head see ``W`` from two sides. Both pairs of factors are kept (At and Gt are
the head's), and merged into one product before the decomposition (`merge_transposed`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from natgrad.errors import SettingError
from natgrad.inverses import Decomposed
from natgrad.layers import SharedInput
from natgrad.layers.embedding import Embedding, TiedHead
from natgrad.linalg.forms import Form, RowForm, Triangle
from natgrad.linalg.symmetric import KroneckerProduct, Symmetric
from natgrad.structures.base import (
    AnyLayer,
    Factor,
    Factors,
    Shape,
    Structure,
    Sums,
    add_vectors,
    no_shared_input,
)
from natgrad.structures.narrowing import check_blocks, narrow_blocks, narrow_form, short_repr
from natgrad.structures.traces import add_traces, more_positions, unit_trace


@dataclass(frozen=True)
class Kronecker(Structure):
    """``F = G x A``, the second moments of output gradients and of inputs.

    Arguments:
        sharing: what the positions (tokens, pixels) of one sample are: ``"expand"`` takes them as
            independent samples, ``"reduce"`` as terms of one sum. Both are exact in their own
            linear setting (Eschenhagen et al. 2023). ``"traces"`` assumes nothing of them: its
            factors are the partial traces of the block.
        input_block: columns of the largest diagonal block that is kept of A; 1 keeps its diagonal,
            None all of it.
        gradient_block: the same for G.
    """

    sharing: Literal["expand", "reduce", "traces"] = "expand"
    input_block: int | None = None
    gradient_block: int | None = None
    needs: ClassVar[tuple[str, ...]] = ("A", "G")

    def __post_init__(self) -> None:
        if self.sharing not in ("expand", "reduce", "traces"):
            raise SettingError(
                f"Kronecker.sharing is {self.sharing!r} but must be 'expand', 'reduce' or "
                "'traces'; leave it out for 'expand'."
            )
        check_blocks(self)

    __repr__ = short_repr

    @property
    def pooled(self) -> bool:  # type: ignore[override]
        return self.sharing != "expand"

    @property
    def whole(self) -> bool:  # type: ignore[override]
        return self.sharing == "traces"

    def factors(self, layers: Sequence[AnyLayer]) -> dict[str, Factor]:
        primary = layers[0]
        if not isinstance(primary, SharedInput):
            raise no_shared_input(primary)
        a = narrow_form(primary.input_form(), self.input_block)
        g = narrow_form(primary.gradient_form(), self.gradient_block)
        if self.sharing != "expand" and not isinstance(a, RowForm):
            a = Triangle(a.dim, a.batch)  # sums over positions have no lags
        if self.sharing == "traces":
            return {"A": Factor(a, of_gradients=True), "G": Factor(g, of_gradients=True)}
        # Means of positions need to know the samples, which a layer's own gradient says.
        kept = {
            "A": Factor(a, of_gradients=False, of_inputs=self.sharing == "expand"),
            "G": Factor(g, of_gradients=True),
        }
        if any(isinstance(layer, TiedHead) for layer in layers):
            # A transposed use has its gradients where A is and its inputs where G is.
            kept["At"] = Factor(a, of_gradients=True)
            kept["Gt"] = Factor(g, of_gradients=False, of_inputs=self.sharing == "expand")
        return kept

    def narrowed(self, layers: Sequence[AnyLayer], max_dim: int) -> Structure:
        return replace(self, **narrow_blocks(self, layers[0], max_dim))

    def fits(self, layer: AnyLayer) -> bool:
        return isinstance(layer, SharedInput)

    def add(self, layer: AnyLayer, x: Any, g: Tensor, sums: Sums) -> None:
        if self.sharing == "expand":
            expand(layer, x, g, sums)

    def summaries(
        self, layer: AnyLayer, x: Any, g: Tensor, samples: int | None
    ) -> Iterator[tuple[Tensor, ...]]:
        if self.sharing == "reduce":
            assert isinstance(layer, SharedInput)
            dtype = torch.float64 if g.dtype == torch.float64 else torch.float32
            a, gs, positions = layer.position_sums(x, g, samples, dtype)
            yield a, gs, torch.as_tensor(positions)
        elif self.sharing == "traces":
            assert isinstance(layer, SharedInput)
            yield from layer.pairs(x, g, samples)

    def combine(self, one: tuple[Tensor, ...], two: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return more_positions(one, two) if self.whole else super().combine(one, two)

    def folded(self, layer: AnyLayer, gs: Sequence[Tensor]) -> Sequence[Tensor]:
        # Each counts by itself, so they may as well be further samples; where inputs say which
        # gradients count, each needs its own.
        one_by_one = self.sharing != "expand" or isinstance(layer, Embedding | TiedHead)
        return gs if one_by_one or len(gs) == 1 else [torch.cat(list(gs))]

    def role(self, layer: AnyLayer) -> str:
        return "t" if self.sharing == "reduce" and isinstance(layer, TiedHead) else ""

    def absorb(
        self, role: str, summary: tuple[Tensor, ...], sums: Sums, decomposed: Factors
    ) -> None:
        if self.whole:
            add_traces(summary[0], summary[1], sums)
            return
        a, g, positions = summary
        means, totals = a / positions.clamp(min=1), g  # a sample may have no position at all
        over_a, over_g = (totals, means) if role else (means, totals)
        for name, rows in ((f"A{role}", over_a), (f"G{role}", over_g)):
            if name in sums:
                add_vectors(sums[name], rows)

    def matrices(self, kept: dict[str, Tensor], forms: dict[str, Form]) -> dict[str, Tensor]:
        return unit_trace(kept, forms) if self.whole else merge_transposed(kept, forms)

    def dampings(
        self, kept: dict[str, Tensor], forms: dict[str, Form], damping: float
    ) -> dict[str, Tensor]:
        """``pi sqrt(damping)`` for A, ``sqrt(damping) / pi`` for G (Martens & Grosse 2015), with
        ``pi^2 = (tr A / dim A) / (tr G / dim G)``: the result does not depend on how the scale of
        the block is split between the two."""
        a, g = (forms[n].trace(kept[n]) / forms[n].dim for n in ("A", "G"))
        ratio = torch.where((a > 0) & (g > 0), a / g, torch.ones_like(a))
        root, pi = damping**0.5, ratio.sqrt()
        return {"A": root * pi, "G": root / pi}

    def assemble(self, decomposed: Factors, in_basis: Mapping[str, Tensor]) -> Decomposed:
        return decomposed["G"].inverse.kronecker(decomposed["G"], decomposed["A"])

    def matrix(
        self, kept: dict[str, Tensor], forms: dict[str, Form], shape: Shape, decomposed: Factors
    ) -> Symmetric:
        merged = self.matrices(kept, forms)
        return KroneckerProduct(*(forms[name].entries(merged[name]) for name in ("G", "A")))


def expand(layer: AnyLayer, x: Any, g: Tensor, sums: Sums) -> None:
    """Add inputs and gradients where every position of every call counts by itself.

    Arguments:
        layer: the one that was called.
        x: what it kept of its input.
        g: the gradient of its output, samples in front.
        sums: those to add to, by the name of the factor; may hold some of the factors only.
    """
    assert isinstance(layer, SharedInput)
    if isinstance(layer, TiedHead):
        if "At" in sums:
            add_vectors(sums["At"], layer.gradients(g).flatten(0, 1)[None])
        if "Gt" in sums:
            add_vectors(sums["Gt"], layer.inputs(x).flatten(0, 1)[None])
        return
    if "A" in sums:
        total = sums["A"]
        total.count += layer.add_inputs(x, total.form, total.kept)
    if "G" in sums:
        total = sums["G"]
        layer.add_gradients(x, g, total.form, total.kept)
        total.count += 1


def merge_transposed(kept: dict[str, Tensor], forms: dict[str, Form]) -> dict[str, Tensor]:
    """One pair of factors for a weight that is also used transposed (a tied embedding).

    ``A1 x G1 + A2 x G2`` is brought to one Kronecker product after scaling both pairs to
    ``tr A1 = tr A2``, which keeps the trace of the sum: ``(A1 + A2)/2 x (G1 + G2)``.

    Arguments:
        kept: factors as buffers, by name; without ``"At"`` they are returned as they are.
        forms: of all factors, by name.
    """
    if "At" not in kept:
        return kept
    if "A" not in kept:
        return {"A": kept["At"], "G": kept["Gt"]}
    own, other = forms["A"].trace(kept["A"]).sum(), forms["A"].trace(kept["At"]).sum()
    scale = torch.where(own * other > 0, own / other, torch.ones_like(own))
    return {"A": (kept["A"] + kept["At"] * scale) / 2, "G": kept["G"] + kept["Gt"] / scale}
