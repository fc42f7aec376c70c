"""Pictures of the factors: how fast they change (Osawa 2019, eq. 19), and their eigenvalues.

change = ‖Xₜ - Xₜ₋₁‖ / ‖Xₜ₋₁‖, quantiles over blocks
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from natgrad.lab.report.canvas import COLOURS, logarithmic, number, short
from natgrad.lab.report.page.colours import Owner, depth, owners
from natgrad.lab.report.page.curves import WIDTH, grid, legend, rows
from natgrad.lab.report.page.figure import Picture, Sheet
from natgrad.lab.report.page.json_files import finite
from natgrad.lab.report.page.run_folder import FactorSpectrum, Run

_NAMES = ("10%", "25%", "median", "75%", "90%")
_LEGEND = 12  # layers, up to which each has its own line in a legend
_DEEP = 1e-7  # of the largest eigenvalue: what lies below is rounding

Quantiles = tuple[float, float, float, float, float]


def changes(run: Run) -> dict[str, list[tuple[int, Quantiles]]]:
    """By factor: steps with the quantiles of the change in the last update before them."""
    found: dict[str, list[tuple[int, Quantiles]]] = {}
    for line in run.of("drift"):
        for name, values in line.values.items():
            numbers = tuple(map(finite, values)) if isinstance(values, list) else ()
            if len(numbers) == len(_NAMES) and all(v is not None and v > 0 for v in numbers):
                quantiles: Any = numbers
                found.setdefault(name, []).append((line.step, quantiles))
    return found


def drift(run: Run, name: str) -> Iterator[Picture]:
    """A picture for each kind of factor, all on the same axes (Fig. 4 of the paper)."""
    found = changes(run)
    every = [v for lines in found.values() for _, quantiles in lines for v in quantiles]
    for i, (factor, lines) in enumerate(found.items()):
        middle = [quantiles[2] for _, quantiles in lines]
        alt = (
            f"change of {factor} between updates against steps: the median over blocks goes from "
            f"{number(middle[0], 3)} to {number(middle[-1], 3)}."
        )
        colour = COLOURS[i % len(COLOURS)]
        yield Picture(
            f"{name}-{_file(factor, i)}",
            f"Change of {factor} from one update to the next",
            alt,
            WIDTH,
            3.5,
            _Bands(factor, lines, colour, (min(every), max(every))).draw,
            "Line: median over blocks; bands: half of the blocks, and 80% of them.",
        )


class _Bands:
    def __init__(
        self,
        factor: str,
        lines: Sequence[tuple[int, Quantiles]],
        colour: str,
        ends: tuple[float, float],
    ) -> None:
        self.factor, self.colour, self.ends = factor, colour, ends
        self.steps = [step for step, _ in lines]
        self.levels = list(zip(*(quantiles for _, quantiles in lines), strict=True))

    def draw(self, sheet: Sheet) -> None:
        axes: Any = sheet.figure.subplots()
        for low, high, alpha in ((0, 4, 0.18), (1, 3, 0.3)):
            axes.fill_between(
                self.steps,
                self.levels[low],
                self.levels[high],
                color=self.colour,
                alpha=alpha,
                linewidth=0,
            )
        for i, (label, level) in enumerate(zip(_NAMES, self.levels, strict=True)):
            strong = i == 2
            (line,) = axes.plot(
                self.steps,
                level,
                color=self.colour,
                linewidth=2.0 if strong else 0.6,
                alpha=1.0 if strong else 0.6,
                marker="o" if len(self.steps) == 1 else "",
            )
            sheet.mark(line, title=f"{self.factor}, {label} of blocks", curve=True)
        least, most = self.ends
        axes.set_ylim(least / 1.3, most * 1.3)
        logarithmic(axes.yaxis)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(lambda value, _: number(value))
        axes.set_xlabel("step")
        axes.set_ylabel(f"relative change of {self.factor}")
        grid(axes)
        sheet.readable(axes, "step", "change")


def spectra(found: Sequence[FactorSpectrum], name: str, step: int) -> Iterator[Picture]:
    """A picture for each kind of factor with a curve for each layer, after so many steps."""
    blocks = list(dict.fromkeys(one.block for one in found))
    colours = _colours(blocks)
    for i, factor in enumerate(dict.fromkeys(one.factor for one in found)):
        some = [one for one in found if one.factor == factor and one.values and one.values[0] > 0]
        if some:
            tops = sorted((one.values[0], one.block) for one in some)
            alt = (
                f"eigenvalues of {factor} by layer: the largest is "
                f"{number(tops[0][0], 3)} in {tops[0][1]} and "
                f"{number(tops[-1][0], 3)} in {tops[-1][1]}."
            )
            shown = _shown([colours[one.block] for one in some])
            yield Picture(
                f"{name}-{_file(factor, i)}",
                f"Eigenvalues of {factor}",
                alt,
                WIDTH,
                3.6 + 0.2 * rows([one.name for one in shown]),
                _Spectra(factor, some, colours, shown).draw,
                f"After step {step:,}; a curve for each layer.",
            )


class _Spectra:
    def __init__(
        self,
        factor: str,
        found: Sequence[FactorSpectrum],
        colours: Mapping[str, Owner],
        shown: Sequence[Owner],
    ) -> None:
        self.factor, self.found, self.colours, self.shown = factor, found, colours, shown

    def draw(self, sheet: Sheet) -> None:
        axes: Any = sheet.figure.subplots()
        top = max(one.values[0] for one in self.found)
        for one in self.found:
            kept = [v for v in one.values if v > _DEEP * top / 10]
            last = max(1, len(one.values) - 1)
            (line,) = axes.plot(
                [100 * i / last for i in range(len(kept))],
                kept,
                color=self.colours[one.block].colour,
                linestyle=self.colours[one.block].dash,
                linewidth=1.4,
                marker="o" if len(kept) == 1 else "",
            )
            sheet.mark(line, title=f"{one.block}: {one.size:,} eigenvalues", curve=True)
        low = max(_DEEP * top, min(v for one in self.found for v in one.values if v > 0))
        axes.set_ylim(low / 1.5, top * 1.5)
        logarithmic(axes.yaxis)
        axes.set_xlim(0, 100)
        axes.set_xlabel("rank, in % of the factor's size")
        axes.set_ylabel(f"eigenvalue of {self.factor}")
        grid(axes)
        sheet.readable(axes, "% of ranks", "eigenvalue")
        legend(sheet, self.shown)


def _colours(blocks: Sequence[str]) -> dict[str, Owner]:
    if len(blocks) <= len(COLOURS):
        return dict(zip(blocks, owners([("", short(block)) for block in blocks]), strict=True))
    last = len(blocks) - 1
    return {block: Owner("", short(block), depth(i / last)) for i, block in enumerate(blocks)}


def _shown(every: Sequence[Owner]) -> list[Owner]:
    """In a legend: all, or the first, the last and some between."""
    if len(every) <= _LEGEND:
        return list(every)
    step = -(-len(every) // (_LEGEND - 1))
    return [every[i] for i in sorted({*range(0, len(every), step), len(every) - 1})]


def _file(factor: str, number: int) -> str:
    return factor if factor.isalnum() and factor.isascii() else str(number)
