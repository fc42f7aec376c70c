"""The whole block of a layer (Osawa 2019, eq. 4): ``F = 1/N sum_n vec(dW_n) vec(dW_n)^T``.

``P^2`` numbers for a layer of ``P`` parameters, and ``P^3`` operations to decompose them. It is for
small layers, and for judging what the other structures leave out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from natgrad.errors import CoverageError
from natgrad.linalg.forms import Form, Triangle
from natgrad.structures.base import AnyLayer, Factor, Shape, plain
from natgrad.structures.per_sample import PerSample


@dataclass(frozen=True)
class Full(PerSample):
    """Nothing is left out within a layer. For small layers.

    Arguments:
        limit: largest number of parameters of a layer, above which making the block raises
            `CoverageError`: its matrix has the square of it, and a decomposition takes the cube.
    """

    limit: int = 8192

    def factors(self, layers: Sequence[AnyLayer]) -> dict[str, Factor]:
        size = prod(layers[0].shape)
        if size > self.limit:
            raise CoverageError(
                f"The full block of {plain(layers[0])} has {size:,} x {size:,} entries "
                f"({4 * size**2 / 2**30:.3g} GiB), above the limit of {self.limit:,} parameters. "
                "Use Kronecker() for it, or Full(limit=...) if that is meant."
            )
        return super().factors(layers)

    def form(self, shape: Shape) -> Form:
        return Triangle(prod(shape))
