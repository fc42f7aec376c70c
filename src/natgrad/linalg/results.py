"""What estimators and iterations return: the value, how far it is to be trusted, and its price."""

from dataclasses import dataclass
from typing import Self

from torch import Tensor


class Number(float):
    """A float that knows how it was found: ``value ± standard_error``, after ``products`` columns.

    The standard error is 0 where the value is exact up to rounding.
    """

    method: str
    standard_error: float
    products: int

    def __new__(
        cls, value: float, method: str = "", standard_error: float = 0.0, products: int = 0
    ) -> Self:
        number = super().__new__(cls, value)
        number.method, number.standard_error, number.products = method, standard_error, products
        return number

    def __str__(self) -> str:
        value = f"{float(self):.6g}"
        return f"{value} ± {self.standard_error:.2g}" if self.standard_error else value

    def __repr__(self) -> str:
        how = ", ".join(filter(None, [self.method, _products(self.products)]))
        return f"{self} ({how})" if how else str(self)


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """A tensor of estimates, with the standard error of each of them (0 where exact)."""

    value: Tensor
    standard_error: Tensor
    products: int
    method: str

    def __repr__(self) -> str:
        error = f"{float(self.standard_error.max()):.2g}" if self.value.numel() else "0"
        shape = "×".join(map(str, self.value.shape))
        return (
            f"Estimate({shape} numbers, ± {error} at most, "
            f"{self.method}, {_products(self.products)})"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Eigenpairs:
    """``values [k]``, descending, and ``vectors [n, k]`` of a symmetric matrix.

    ``residuals [k]`` are ``‖A v - λ v‖ / max|λ|``.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    converged: bool
    products: int
    method: str

    def __repr__(self) -> str:
        return f"Eigenpairs({_numbers(self.values)}; {_end(self)})"


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """``x [n, k]`` (or ``[n]``), and for each column the size of what is left, ``residuals [k]``.

    Of a linear system that is ``‖b - A x‖ / ‖b‖``, of a function of a matrix an estimate of the
    relative error.
    """

    x: Tensor
    residuals: Tensor
    converged: bool
    products: int
    method: str

    def __repr__(self) -> str:
        return f"Solution({'×'.join(map(str, self.x.shape))} numbers; {_end(self)})"


def _numbers(values: Tensor) -> str:
    """The first few of them."""
    shown = [f"{float(value):.4g}" for value in values[:5]]
    return ", ".join(shown + ["…"] * (len(values) > 5))


def _products(count: int) -> str:
    return f"{count} product{'s' * (count != 1)}" if count else ""


def _end(result: Eigenpairs | Solution) -> str:
    """How it ended."""
    worst = float(result.residuals.max()) if result.residuals.numel() else 0.0
    end = "converged" if result.converged else "NOT converged"
    parts = [f"{end}, residuals up to {worst:.1e}", result.method, _products(result.products)]
    return ", ".join(filter(None, parts))
