"""What estimators and iterations return: the value, how far it is to be trusted, and its price.

A trace from random vectors without its error, or eigenvalues that have not converged, look just
like exact ones. So `Number`, `Estimate`, `Eigenpairs` and `Solution` carry the method, standard
errors or residuals, convergence and the number of products.
"""

from dataclasses import dataclass
from typing import Self

from torch import Tensor


class Number(float):
    """A float that knows how it was found.

    Arguments:
        value: the float that it is.
        method: how it was found, in words; shown by ``repr``.
        standard_error: of an estimate, shown after ``±``; 0 where the value is exact up to
            rounding.
        products: number of matrix-vector products it took; 0 if that was not counted.
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
    """A tensor of estimates.

    Arguments:
        value: the estimates, of any shape.
        standard_error: of each entry, 0 where exact; the shape of ``value``.
        products: number of matrix-vector products it took.
        method: how it was found, in words.
    """

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
    """Some eigenvalues and eigenvectors of a symmetric matrix.

    Arguments:
        values: ``[k]``, descending, also where the smallest were asked for.
        vectors: ``[n, k]``, orthonormal columns in the order of ``values``.
        residuals: ``[k]``: ``‖A v - λ v‖ / max|λ|``, with the largest absolute eigenvalue met.
        converged: whether all residuals are within the tolerance; always for pairs in closed form.
        products: number of matrix-vector products it took.
        method: how they were found, in words.
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
    """The solution of linear systems, or a function of a matrix times vectors.

    Arguments:
        x: ``[n]`` or ``[n, k]``, as the right-hand side was given.
        residuals: one for each column: of a linear system ``‖b - A x‖ / ‖b‖``, of a function of a
            matrix an estimate of the relative error.
        converged: whether all residuals are within the tolerance.
        products: number of matrix-vector products it took.
        method: how it was found, in words.
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
