"""A symmetric matrix of which only products ``x -> A x`` are known, and random vectors to try it.

Vectors are drawn on the CPU and in one precision, so that they are the same on every device, on
every rank and in every dtype.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from natgrad.errors import ConvergenceError, SettingError

Product = Callable[[Tensor], Tensor]

# Numbers in the columns that are multiplied at once, and in a dense matrix that is still small.
_AT_ONCE = 1 << 24
_DENSE = 1 << 24


class MatrixFree:
    """``A [n, n]`` by its products ``[n, k] -> [n, k]``, which are counted in columns and checked.

    Half precision is left to the product: everything around it is done in float32.
    """

    def __init__(
        self,
        product: Product,
        n: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.n = at_least("n", n, 1)
        if not dtype.is_floating_point:
            raise SettingError(
                f"dtype is {dtype} but must be a floating-point one: give that of the matrix."
            )
        self._product, self._given = product, dtype
        self.dtype, self.device = torch.promote_types(dtype, torch.float32), torch.device(device)
        self.products = 0

    @property
    def precision(self) -> float:
        """The spacing of numbers at 1, of the coarser of the product's and the work's dtype."""
        return torch.finfo(self._given).eps

    @property
    def small(self) -> bool:
        """Whether it may be written down."""
        return self.n**2 <= _DENSE

    def __call__(self, x: Tensor) -> Tensor:
        """``A x [n, k]``."""
        found = self._product(x.to(self._given).contiguous()).detach()
        if found.shape != x.shape:
            raise SettingError(
                f"The product of the matrix with a tensor of shape {list(x.shape)} has shape "
                f"{list(found.shape)} but must keep it: let it take and give [n, k]."
            )
        self.products += x.shape[1]
        found = found.to(self.dtype)
        if not bool(found.isfinite().all()):
            raise ConvergenceError(
                f"A product of the matrix with finite vectors is not finite (after {self.products} "
                "products): look for overflow or NaN in the model, the loss or the data."
            )
        return found

    def identity(self) -> Iterator[Tensor]:
        """``[n, k]``, the columns of the identity in pieces."""
        for first in range(0, self.n, self.width):
            columns = torch.arange(first, min(first + self.width, self.n), device=self.device)
            piece = torch.zeros(self.n, len(columns), dtype=self.dtype, device=self.device)
            piece[columns, columns - first] = 1.0
            yield piece

    @property
    def width(self) -> int:
        """Columns to multiply at once."""
        return max(1, min(self.n, _AT_ONCE // self.n))

    def dense(self) -> Tensor:
        """``[n, n]``, symmetric, in float64 on the CPU."""
        whole = torch.cat([self(piece).cpu().double() for piece in self.identity()], 1)
        return (whole + whole.T) / 2

    def signs(self, count: int, generator: torch.Generator) -> Tensor:
        """``[n, count]`` of independent +1 and -1 (Rademacher); any split draws the same."""
        coins = torch.randint(2, (count, self.n), generator=generator, dtype=torch.int8)
        return coins.to(self.dtype).mul_(2).sub_(1).to(self.device).T

    def gaussians(self, count: int, generator: torch.Generator) -> Tensor:
        """``[n, count]`` of independent standard normal numbers."""
        numbers = torch.randn(count, self.n, generator=generator, dtype=torch.float64)
        return numbers.to(self.dtype).to(self.device).T


def generator_of(seed: int) -> torch.Generator:
    """The CPU generator every draw comes from."""
    return torch.Generator().manual_seed(seed)


def at_least(name: str, value: int, lowest: int) -> int:
    """The value, if it is a whole number that large."""
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise SettingError(
            f"{name} is {value!r} but must be a whole number of at least {lowest}: give one."
        )
    return value


def tolerance_of(tolerance: float, matrix: MatrixFree) -> float:
    """The tolerance, or what the precision allows to reach if that is more."""
    if not 0 < tolerance < 1:
        raise SettingError(
            f"tolerance is {tolerance!r} but must lie between 0 and 1: it is a relative residual, "
            "1e-5 for instance."
        )
    return max(tolerance, 16 * matrix.precision)


def columns_of(name: str, v: Tensor) -> Tensor:
    """``[n, k]`` of one vector ``[n]`` or several ``[n, k]``."""
    if v.dim() not in (1, 2) or not v.is_floating_point() or v.shape[0] == 0:
        raise SettingError(
            f"{name} is a {v.dtype} tensor of shape {list(v.shape)} but must hold floating-point "
            "numbers, shaped [n] or [n, k]: flatten it."
        )
    return v.unsqueeze(1) if v.dim() == 1 else v
