"""How far two matrices are apart: ``|A - B| / |B|``, and the angle of solutions (Yokota 2022)."""

from torch import Tensor

from natgrad.linalg.results import Number
from natgrad.operators.base import Operator


def compare(approximation: Operator, truth: Operator) -> Number:
    """The relative Frobenius error ``|A - B| / |B|``.

    Arguments:
        approximation: ``A``.
        truth: ``B``, over the same parameters. The norms are exact up to 2,048 parameters, else
            estimates, with a standard error.
    """
    apart, size = (approximation - truth).norm(), truth.norm()
    value = float(apart) / float(size) if size else float("inf") if apart else 0.0
    spread = [n.standard_error / float(n) if n else 0.0 for n in (apart, size)]
    error = value * (spread[0] ** 2 + spread[1] ** 2) ** 0.5
    return Number(value, apart.method, error, apart.products + size.products)


def cosine(one: Operator, other: Operator, v: Tensor, damping: float) -> float:
    """The cosine between ``(A + damping I)^-1 v`` and ``(B + damping I)^-1 v``: 1 where both
    matrices give the same direction.

    Arguments:
        one: ``A``.
        other: ``B``, over the same parameters.
        v: a flat vector ``[P]``, such as the gradient; where both solutions are 0 the cosine is 1.
        damping: ``λ ≥ 0``, added to every eigenvalue of both.
    """
    a, b = one.solve(v, damping), other.solve(v, damping)
    size = float(a.norm() * b.norm())
    return float(a @ b) / size if size else 1.0
