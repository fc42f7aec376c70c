"""Pictures of curvature matrices: spectra, norms of blocks, and approximations (Yokota 2022).

Every function takes what was measured, writes a file if it is given a path, and returns the figure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log10, pi, sqrt
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from natgrad.errors import SettingError
from natgrad.lab.report.canvas import COLOURS, FAINT, PathTo, bare, figure, panels, shape, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from natgrad.lab.report.quality import Distance, Quality
    from natgrad.operators import Spectrum

_POINTS = 1000  # of a curve
_LEAST = 0.1  # eigenvalues: what lies below is not drawn
_WRITTEN = 12  # layers, up to which the cells of a heat map hold numbers
_LEGEND = 12  # layers, up to which each has its own line in a legend


@dataclass(frozen=True, eq=False)
class NamedSpectrum:
    """Where the eigenvalues of a matrix are, and the largest of them one by one, ``top [k]``."""

    name: str
    spectrum: Spectrum
    top: Tensor


@dataclass(frozen=True, eq=False)
class LayerSpectra:
    """The largest eigenvalues ``[k]``, descending, of every layer's block of a matrix."""

    name: str
    layers: dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class BlockNorms:
    """Frobenius norms ``[layers, layers]`` of the blocks of a matrix."""

    name: str
    layers: Sequence[str]
    norms: Tensor


def spectra(found: Sequence[NamedSpectrum], path: PathTo = None) -> Figure:
    """A panel for each matrix: how many eigenvalues there are where, with a line for each of the
    largest. All panels have the same axes."""
    _some(found, "spectra")
    low = min(_ends(one)[0] for one in found)
    high = max(_ends(one)[1] for one in found)
    width = 0.01 * (high - low) or 0.01 * abs(high) or 1.0
    most = max(one.spectrum.quadrature.n for one in found)
    rows, columns = shape(len(found))
    with figure(0.6 + 3.4 * columns, 3.4 * rows, path) as made:
        row = panels(made, len(found), sharey=True)
        for i, (axes, one) in enumerate(zip(row, found, strict=True)):
            density = one.spectrum.density(_POINTS, width)
            # A lone eigenvalue is a peak of height 1.
            count = one.spectrum.quadrature.n * density.values * width * sqrt(2 * pi)
            grid, height = density.grid.numpy(), count.clamp(min=_LEAST).numpy()
            colour = COLOURS[i % 6]  # the last is that of the lines
            axes.fill_between(grid, _LEAST, height, color=colour, alpha=0.3)
            axes.plot(grid, height, color=colour, linewidth=1.2)
            top = one.top.double().cpu().numpy()
            axes.vlines(top, _LEAST, 1.0, color=COLOURS[-1], linewidth=1.0)
            axes.set_yscale("log")
            axes.set_ylim(_LEAST, 2.0 * most)
            axes.set_xlim(low - 3 * width, high + 3 * width)
            axes.axvline(0.0, color=FAINT, linewidth=0.6, linestyle=":")
            axes.set_title(one.name)
            axes.set_xlabel("eigenvalue")
            bare(axes)
            if i % columns == 0:
                axes.set_ylabel(f"eigenvalues within {_plain(width * sqrt(2 * pi))}")
            if len(one.top):
                text = f"lines: the {len(one.top)} largest\nlargest: {float(one.top.max()):.3g}"
                axes.text(
                    0.97, 0.95, text, ha="right", va="top", transform=axes.transAxes, fontsize=9
                )
    return made


def layer_spectra(found: Sequence[LayerSpectra], path: PathTo = None) -> Figure:
    """A panel for each matrix and a curve for each layer: its largest eigenvalues by rank."""
    _some(found, "layer spectra")
    names = list(dict.fromkeys(name for one in found for name in one.layers))
    rows, columns = shape(len(found))
    with figure(1.4 + 3.4 * columns, 3.4 * rows, path) as made:
        from matplotlib import colormaps
        from matplotlib.ticker import MaxNLocator

        colour = colormaps["cividis"].resampled(256)
        few = len(names) <= len(COLOURS)
        row = panels(made, len(found), sharey=True)
        for axes, one in zip(row, found, strict=True):
            for name, values in one.layers.items():
                number = names.index(name)
                depth = 0.88 * number / max(1, len(names) - 1)
                kept = values.double().cpu()
                kept = kept[kept > 0]
                axes.plot(
                    range(1, len(kept) + 1),
                    kept.numpy(),
                    color=COLOURS[number] if few else colour(depth),
                    linewidth=1.3,
                    marker="os^Dv<>"[number % 7],
                    markersize=3,
                    label=short(name),
                )
            axes.set_yscale("log")
            axes.set_title(one.name)
            axes.set_xlabel("rank")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(alpha=0.25, linewidth=0.5)
            bare(axes)
        for axes in row[::columns]:
            axes.set_ylabel("eigenvalue of the layer's block")
        handles, labels = row[0].get_legend_handles_labels()
        if len(names) > _LEGEND:  # the first, the last, and some between
            step = -(-len(names) // (_LEGEND - 1))
            chosen = sorted({*range(0, len(handles), step), len(handles) - 1})
            handles, labels = [handles[i] for i in chosen], [labels[i] for i in chosen]
        made.legend(handles, labels, loc="outside right upper", frameon=False, title="layer")
    return made


def block_norms(found: Sequence[BlockNorms], path: PathTo = None) -> Figure:
    """A heat map for each matrix: the norm of the block between every two layers, on one scale."""
    _some(found, "block norms")
    for one in found:
        if one.norms.shape != (len(one.layers), len(one.layers)):
            raise SettingError(
                f"The norms of {one.name} have the shape {list(one.norms.shape)} but there are "
                f"{len(one.layers)} layers: give a row and a column for each of them."
            )
    every = torch.cat([one.norms.flatten().double().cpu() for one in found])
    top = float(every.max())
    positive = every[every > 0]
    # Six powers of ten can be told apart by their colours.
    low = max(float(positive.min()), 1e-6 * top) if len(positive) else 1e-6
    top = max(top, 1.5 * low)
    layers = max(len(one.layers) for one in found)
    side = max(2.6, min(0.42 * layers, 6.5))
    rows, columns = shape(len(found))
    longest = max(len(short(name)) for one in found for name in one.layers)
    with figure(
        1.0 + 0.075 * longest + (side + 0.15) * columns, (side + 0.5 + 0.075 * longest) * rows, path
    ) as made:
        from matplotlib.colors import LogNorm

        row = panels(made, len(found), sharey=len({tuple(one.layers) for one in found}) == 1)
        for axes, one in zip(row, found, strict=True):
            values = one.norms.double().cpu()
            image = axes.imshow(
                values.clamp(min=low).numpy(), cmap="cividis", norm=LogNorm(low, top)
            )
            ticks = range(0, len(one.layers), -(-len(one.layers) // 40))
            labels = [short(one.layers[i]) for i in ticks]
            axes.set_xticks(list(ticks), labels, rotation=90 if longest > 4 else 0)
            axes.set_yticks(list(ticks), labels)
            axes.tick_params(length=0)
            axes.set_title(one.name)
            if len(one.layers) <= _WRITTEN:
                _write(axes, values, low, top)
        made.colorbar(image, ax=list(row), label="Frobenius norm of the block", shrink=0.9)
    return made


def approximation(found: Sequence[Quality], path: PathTo = None) -> Figure:
    """How far every structure of every matrix is from the same matrix in full, a column for
    each state of training (Yokota 2022)."""
    return _approximation(found, lambda cell: cell.own, "the same matrix in full", path)


def approximation_of_fisher(found: Sequence[Quality], path: PathTo = None) -> Figure:
    """The same, from the exact Fisher matrix in full."""
    return _approximation(found, lambda cell: cell.fisher, "the exact Fisher in full", path)


def _approximation(
    found: Sequence[Quality], distance: Callable[..., Distance], truth: str, path: PathTo
) -> Figure:
    _some(found, "qualities")
    matrices = list(dict.fromkeys(cell.matrix for one in found for cell in one.cells))
    structures = list(dict.fromkeys(cell.structure for one in found for cell in one.cells))
    with figure(1.2 + 4.0 * len(found), 5.6, path) as made:
        rows = made.subplots(2, len(found), squeeze=False, sharex=True, sharey="row")
        for column, one in enumerate(found):
            cells = {(cell.matrix, cell.structure): distance(cell) for cell in one.cells}
            errors = {key: found.error for key, found in cells.items()}
            cosines = {key: found.cosine for key, found in cells.items()}
            _bars(rows[0][column], errors, matrices, structures)
            _bars(rows[1][column], cosines, matrices, structures)
            rows[0][column].set_title(one.label)
        rows[0][0].set_ylabel("relative Frobenius error")
        rows[1][0].set_ylabel("cosine of solved gradients")
        for axes in rows[1]:
            axes.set_ylim(min(0.0, axes.get_ylim()[0]), 1.05)
        handles, labels = rows[0][0].get_legend_handles_labels()
        made.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=len(labels),
            frameon=False,
            columnspacing=1.2,
            handlelength=1.2,
        )
        made.suptitle(f"Distance from {truth}, damping {found[0].damping:g}", fontsize=11)
    return made


def _bars(
    axes: Axes,
    values: dict[tuple[str, str], float],
    matrices: Sequence[str],
    structures: Sequence[str],
) -> None:
    width = 0.84 / len(structures)
    for i, structure in enumerate(structures):
        at = [j - 0.42 + (i + 0.5) * width for j in range(len(matrices))]
        heights = [values.get((matrix, structure), float("nan")) for matrix in matrices]
        axes.bar(at, heights, 0.9 * width, color=COLOURS[i % len(COLOURS)], label=structure)
    axes.set_xticks(range(len(matrices)), matrices)
    axes.tick_params(axis="x", length=0)
    axes.grid(axis="y", alpha=0.3, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.axhline(0.0, color=COLOURS[-1], linewidth=0.6)
    bare(axes)


def _write(axes: Axes, values: Tensor, low: float, top: float) -> None:
    """Numbers into the cells, light on dark and dark on light."""
    for i, line in enumerate(values.tolist()):
        for j, value in enumerate(line):
            share = (log10(max(value, low)) - log10(low)) / (log10(top) - log10(low))
            text = f"{value:.0f}" if 100 <= value < 1000 else f"{value:.2g}"
            text = text.replace("e-0", "e-").replace("e+0", "e")
            axes.text(
                j,
                i,
                text,
                ha="center",
                va="center",
                fontsize=7.5,
                color="white" if share < 0.55 else "black",
            )


def _ends(one: NamedSpectrum) -> tuple[float, float]:
    """The smallest and the largest eigenvalue that are known."""
    both = torch.cat([one.spectrum.quadrature.nodes.flatten(), one.top.double().cpu()])
    return float(both.min()), float(both.max())


def _plain(value: float) -> str:
    return f"{value:.2g}"


def _some(found: Sequence[object], what: str) -> None:
    if not found:
        raise SettingError(f"There are no {what} to draw: give at least one.")
