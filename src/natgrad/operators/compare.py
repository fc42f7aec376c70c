"""How far two matrices are apart (Y7): ``|A - B| / |B|``, and the angle of solved vectors."""

from torch import Tensor

from natgrad.linalg.results import Number
from natgrad.operators.base import Operator


def compare(approximation: Operator, truth: Operator) -> Number:
    """The relative Frobenius error ``|A - B| / |B|``."""
    apart, size = (approximation - truth).norm(), truth.norm()
    value = float(apart) / float(size) if size else float("inf") if apart else 0.0
    spread = [n.standard_error / float(n) if n else 0.0 for n in (apart, size)]
    error = value * (spread[0] ** 2 + spread[1] ** 2) ** 0.5
    return Number(value, apart.method, error, apart.products + size.products)


def cosine(one: Operator, other: Operator, v: Tensor, damping: float) -> float:
    """Between ``(A + damping I)^-1 v`` and ``(B + damping I)^-1 v`` for a flat vector ``v [P]``."""
    a, b = one.solve(v, damping), other.solve(v, damping)
    size = float(a.norm() * b.norm())
    return float(a @ b) / size if size else 1.0
