"""The density of eigenvalues, and its picture."""

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from typing import Any

from torch import Tensor

from natgrad.linalg.density import Density, Quadrature
from natgrad.linalg.results import Number


@dataclass(frozen=True, eq=False)
class Spectrum:
    """The density of the eigenvalues of a matrix, found by stochastic Lanczos quadrature.

    Arguments:
        kind: name of the matrix, for print and pictures.
        quadrature: nodes and weights, one set for each random vector.
    """

    kind: str
    quadrature: Quadrature

    def density(self, points: int = 1000, width: float | None = None) -> Density:
        """On a grid, smoothed, with the standard error of each point.

        Arguments:
            points: number of grid points, at least 2, over the range of the eigenvalues and 4
                widths beyond either end.
            width: ``> 0``, standard deviation of the Gaussian that stands for each eigenvalue, in
                their units; ``None`` is 1% of their range.
        """
        return self.quadrature.density(points, width)

    def trace(self, function: Callable[[Tensor], Tensor]) -> Number:
        """``tr f(A)``, with its standard error.

        Arguments:
            function: ``f`` of a tensor of eigenvalues, entry by entry; must be finite at all of
                them.
        """
        return self.quadrature.trace(function)

    def draw(self, path: str | PathLike[str] | None = None) -> Any:
        """A ``matplotlib`` figure, also written to ``path``.

        Arguments:
            path: file to write, whose ending says the format, such as ``spectrum.png``; ``None``
                writes none.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise ModuleNotFoundError(
                "Spectrum.draw needs matplotlib, which is not installed: pip install "
                "'natgrad[report]', or read .density()."
            ) from None
        found = self.density()
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        axes = figure.subplots()
        grid, values = found.grid.numpy(), found.values.numpy()
        error = found.standard_error.numpy()
        floor = max(float(values.max()) * 1e-7, 1e-12)
        axes.fill_between(
            grid, (values - error).clip(floor), (values + error).clip(floor), alpha=0.3, lw=0
        )
        axes.semilogy(grid, values.clip(floor))
        axes.set_ylim(floor, float(values.max()) * 2)
        axes.set_xlabel("eigenvalue")
        axes.set_ylabel("density")
        axes.set_title(f"{self.kind}, {self.quadrature.n:,} parameters", fontsize=10)
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure

    def __repr__(self) -> str:
        return f"<spectrum of {self.kind}: {self.quadrature!r}>"
