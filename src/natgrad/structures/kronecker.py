"""``F = G x A`` per layer (O3): inputs and output gradients are averaged apart.

expand:  ``A = 1/(N S) sum_{n,s} a a^T``,          ``G = 1/N sum_{n,s} g g^T``
reduce:  ``A = 1/N sum_n mean_s(a) mean_s(a)^T``,  ``G = 1/N sum_n sum_s(g) sum_s(g)^T``
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from natgrad.errors import CoverageError, SettingError
from natgrad.inverses import Inverse, Parts, floored
from natgrad.layers import SharedInput
from natgrad.layers.embedding import Embedding, TiedHead
from natgrad.linalg.forms import Form, Triangle
from natgrad.linalg.products import two_sided
from natgrad.linalg.symmetric import KroneckerProduct, Symmetric
from natgrad.linalg.workspace import workspace
from natgrad.structures.base import (
    AnyLayer,
    Cache,
    Factor,
    Shape,
    Structure,
    Sums,
    add_vectors,
    plain,
)


@dataclass(frozen=True)
class Kronecker(Structure):
    """``sharing`` says what positions (tokens, pixels) of one sample are: ``"expand"`` takes them
    as independent, ``"reduce"`` as terms of one sum. Both are exact in their own linear setting."""

    sharing: Literal["expand", "reduce"] = "expand"
    needs: ClassVar[tuple[str, ...]] = ("A", "G")

    def __post_init__(self) -> None:
        if self.sharing not in ("expand", "reduce"):
            raise SettingError(
                f"Kronecker.sharing is {self.sharing!r} but must be 'expand' or 'reduce'; leave it "
                "out for 'expand'."
            )

    @property
    def pooled(self) -> bool:  # type: ignore[override]
        return self.sharing == "reduce"

    def factors(self, layers: Sequence[AnyLayer]) -> dict[str, Factor]:
        primary = layers[0]
        if not isinstance(primary, SharedInput):
            raise CoverageError(
                f"Kronecker factors need an input shared by all output units, which "
                f"{plain(primary)} does not have. Use UnitWise() for it."
            )
        a, g = primary.input_form(), primary.gradient_form()
        if self.sharing == "reduce" and not a.diagonal:
            a = Triangle(a.dim, a.batch)  # means of positions have no lags
        kept = {"A": Factor(a, of_gradients=False), "G": Factor(g, of_gradients=True)}
        if any(isinstance(layer, TiedHead) for layer in layers):
            # A transposed use has its gradients where A is and its inputs where G is.
            kept["At"] = Factor(a, of_gradients=True)
            kept["Gt"] = Factor(g, of_gradients=False)
        return kept

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

    def folded(self, layer: AnyLayer, gs: Sequence[Tensor]) -> Sequence[Tensor]:
        # Each counts by itself, so they may as well be further samples; where inputs say which
        # gradients count, each needs its own.
        one_by_one = self.sharing == "reduce" or isinstance(layer, Embedding | TiedHead)
        return gs if one_by_one or len(gs) == 1 else [torch.cat(list(gs))]

    def role(self, layer: AnyLayer) -> str:
        return "t" if self.sharing == "reduce" and isinstance(layer, TiedHead) else ""

    def absorb(
        self, role: str, summary: tuple[Tensor, ...], sums: Sums, parts: dict[str, Parts]
    ) -> None:
        a, g, positions = summary
        means, totals = a / positions.clamp(min=1), g  # a sample may have no position at all
        over_a, over_g = (totals, means) if role else (means, totals)
        for name, rows in ((f"A{role}", over_a), (f"G{role}", over_g)):
            if name in sums:
                add_vectors(sums[name], rows)

    def decomposed(self, kept: dict[str, Tensor], forms: dict[str, Form]) -> dict[str, Tensor]:
        return merge_transposed(kept, forms)

    def dampings(
        self, kept: dict[str, Tensor], forms: dict[str, Form], damping: float
    ) -> dict[str, Tensor]:
        """``pi sqrt(damping)`` for A and ``sqrt(damping) / pi`` for G (O15), with
        ``pi^2 = (tr A / dim A) / (tr G / dim G)``: the result does not depend on how the scale of
        the block is split between the two."""
        a, g = (forms[n].trace(kept[n]) / forms[n].dim for n in ("A", "G"))
        ratio = torch.where((a > 0) & (g > 0), a / g, torch.ones_like(a))
        root, pi = damping**0.5, ratio.sqrt()
        return {"A": root * pi, "G": root / pi}

    def precondition(
        self, parts: dict[str, Parts], inverse: Inverse, m: Tensor, damping: float, cache: Cache
    ) -> Tensor:
        if not inverse.joint:
            (a,), (g,) = parts["A"], parts["G"]
            return apply_inverses(g, m, a)
        return filtered(parts["G"][0], parts["A"][0], m, _scale(parts, damping, cache))

    def precondition_outer(
        self, parts: dict[str, Parts], g: Tensor, a: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Of the gradient ``g^T a`` with ``g [k, rows]``, ``a [k, cols]``: ``left [k, rows]`` and
        ``right [k, cols]`` with ``left^T right`` the preconditioned gradient.

        ``a`` may have a column less: a constant 1 is then the last one. Only for inverses of each
        factor: a joint damping would need the product.
        """
        (inverse_a,), (inverse_g,) = parts["A"], parts["G"]
        if a.shape[1] == inverse_a.shape[1]:
            return g @ inverse_g[0], a @ inverse_a[0]
        return g @ inverse_g[0], torch.addmm(inverse_a[0, -1], a, inverse_a[0, :-1])

    def multiply(
        self, parts: dict[str, Parts], inverse: Inverse, m: Tensor, damping: float
    ) -> Tensor:
        if not inverse.joint:
            half = inverse.multiply(parts["G"], m, damping)
            return inverse.multiply(parts["A"], half.mT.contiguous(), damping).mT
        (ra, la), (rg, lg) = parts["A"], parts["G"]
        return filtered(rg, ra, m, lg.unsqueeze(2) * la.unsqueeze(1))

    def matrix(
        self,
        kept: dict[str, Tensor],
        forms: dict[str, Form],
        shape: Shape,
        parts: dict[str, Parts] | None = None,
    ) -> Symmetric:
        merged = self.decomposed(kept, forms)
        return KroneckerProduct(*(forms[name].entries(merged[name]) for name in ("G", "A")))


def _scale(parts: dict[str, Parts], damping: float, cache: Cache) -> Tensor:
    """``1 / (l_G l_A + damping)``, ``[b, rows, cols]``."""
    if cache.get("damping") != damping:
        (_, la), (_, lg) = parts["A"], parts["G"]
        values = lg.unsqueeze(2) * la.unsqueeze(1)
        largest = lg.amax(1) * la.amax(1)
        cache.update(damping=damping, scale=floored(values + damping, largest).reciprocal_())
    scale: Tensor = cache["scale"]
    return scale


def expand(layer: AnyLayer, x: Any, g: Tensor, sums: Sums) -> None:
    """Every position of every call counts by itself."""
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
    """
    if "At" not in kept:
        return kept
    if "A" not in kept:
        return {"A": kept["At"], "G": kept["Gt"]}
    own, other = forms["A"].trace(kept["A"]).sum(), forms["A"].trace(kept["At"]).sum()
    scale = torch.where(own * other > 0, own / other, torch.ones_like(own))
    return {"A": (kept["A"] + kept["At"] * scale) / 2, "G": kept["G"] + kept["Gt"] / scale}


def filtered(rows_g: Tensor, rows_a: Tensor, m: Tensor, scale: Tensor) -> Tensor:
    """``Q_G ((Q_G^T m Q_A) * scale) Q_A^T`` for ``m [b, r, c]``; ``rows`` are ``Q^T``."""
    space = workspace("rotated", (m.numel(),), m).view(m.shape)
    rotated = two_sided(rows_g, m, _transposed(rows_a), space).mul_(scale)
    return two_sided(_transposed(rows_g), rotated, rows_a, torch.empty_like(m))


def apply_inverses(g: Tensor, m: Tensor, a: Tensor) -> Tensor:
    """``g m a`` with inverses that are dense ``[b, d, d]`` or diagonal ``[b, d]``."""
    empty = m.new_empty(0)
    left = empty if g.ndim == 2 else g
    right = empty if a.ndim == 2 else a
    out = two_sided(left, m, right, torch.empty_like(m))
    if g.ndim == 2:
        out *= g.unsqueeze(2)
    if a.ndim == 2:
        out *= a.unsqueeze(1)
    return out


def _transposed(rows: Tensor) -> Tensor:
    return rows.mT if rows.ndim == 3 else rows
