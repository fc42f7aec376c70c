"""What is read from a curvature matrix first: trace, norm, both ends of its spectrum, condition."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt

import torch
from torch import Tensor

from natgrad.linalg.results import Eigenpairs, Number
from natgrad.operators import Lanczos, Operator
from natgrad.operators.base import SMALL
from natgrad.operators.layer_blocks import indices
from natgrad.tables import Column, Table

_PROBES = 100  # products of an estimate


@dataclass(frozen=True, eq=False)
class Matrix:
    """``layers``: the trace of each layer's block; ``damping`` is part of the condition alone."""

    name: str
    structure: str
    size: int
    trace: Number
    norm: Number
    largest: Eigenpairs
    smallest: Eigenpairs
    layers: dict[str, Number]
    damping: float

    @property
    def condition(self) -> float:
        """``(λ_max + damping) / (λ_min + damping)``, infinite if that is not definite."""
        low = float(self.smallest.values[-1]) + self.damping
        return (float(self.largest.values[0]) + self.damping) / low if low > 0 else inf

    @property
    def converged(self) -> bool:
        return self.largest.converged and self.smallest.converged

    @property
    def residual(self) -> float:
        """The largest, relative to the largest eigenvalue in size."""
        both = (self.largest.residuals.max(), self.smallest.residuals.max())
        return max(float(one) for one in both)


def measure(
    operator: Operator,
    name: str,
    structure: str,
    *,
    k: int = 10,
    damping: float = 0.0,
    seed: int = 0,
) -> Matrix:
    """``k`` eigenvalues at the upper end and one at the lower."""
    trace, layers = traces(operator, seed)
    by = Lanczos(seed=seed)
    return Matrix(
        name,
        structure,
        operator.size,
        trace,
        operator.norm(),
        operator.eigenvalues(min(k, operator.size), by=by),
        operator.eigenvalues(1, smallest=True, by=by),
        layers,
        damping,
    )


def traces(operator: Operator, seed: int = 0) -> tuple[Number, dict[str, Number]]:
    """That of the matrix, and those of every layer's diagonal block. Of a large Hessian they are
    means of ``z_lᵀ (H z)_l`` over random signs ``z``, all from the same products."""
    where = indices(operator)
    if operator.definite or operator.closed or operator.size <= SMALL:
        diagonal = operator.diagonal().double().cpu()
        said = "exact: the sum of the diagonal"
        layers = {n: Number(float(diagonal[i.cpu()].sum()), said) for n, i in where.items()}
        return Number(float(diagonal.sum()), said), layers
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, (operator.size, _PROBES), generator=generator) * 2 - 1
    z = signs.to(operator.device, operator.dtype)
    each = (z * operator.product(z)).double()
    return _mean(each.sum(0)), {name: _mean(each[i].sum(0)) for name, i in where.items()}


def _mean(each: Tensor) -> Number:
    said, error = f"{len(each)} vectors of random signs", float(each.std()) / sqrt(len(each))
    return Number(float(each.mean()), said, error, len(each))


def text(number: Number) -> str:
    """With its standard error, and no more digits than that leaves."""
    if not number.standard_error:
        return f"{float(number):.6g}"
    return f"{float(number):.4g} ± {number.standard_error:.2g}"


def _unless_zero(one: Matrix) -> str:
    """``λ_min``, where it can be told from 0."""
    low, high = float(one.smallest.values[-1]), float(one.largest.values[0])
    rounding = 1e-6 if one.smallest.values.dtype == torch.float32 else 1e-14
    error = max(rounding, float(one.smallest.residuals.max())) * max(abs(low), abs(high))
    return f"{low:.3g}" if abs(low) > error else "0"


def table(found: Sequence[Matrix]) -> Table:
    rows = []
    for one in found:
        condition = one.condition
        rows.append(
            (
                one.name,
                one.structure,
                text(one.trace),
                f"{float(one.largest.values[0]):.6g}",
                _unless_zero(one),
                text(one.norm),
                "indefinite" if condition == inf else f"{condition:.3g}",
                f"{one.residual:.1e}" + ("" if one.converged else ", not converged"),
            )
        )
    names = ("trace", "λ max", "λ min", "norm", "condition", "residual")
    columns = (
        Column("matrix"),
        Column("structure"),
        *(Column(name, "right") for name in names),
    )
    damping = f"{found[0].damping:g}" if found else "0"
    footer = (
        "±: standard error, where a number is an estimate; norm: Frobenius; condition: with "
        f"damping {damping}; residual: of eigenvalues, relative to the largest"
    )
    return Table("Matrices", columns, tuple(rows), footer)
