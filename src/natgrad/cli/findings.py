"""All that `natgrad curvature` finds: tables to print, pictures, and the same as plain numbers."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from natgrad.cli import matrix_words, measure_tables, terminal
from natgrad.cli.short_training import LIMIT, accuracy, train
from natgrad.errors import SettingError
from natgrad.lab.report import curvature_plots as pictures
from natgrad.lab.report import matrix_tables as matrices
from natgrad.lab.report import quality
from natgrad.lab.report.dense_cache import written
from natgrad.lab.report.sizes import layers_table, sizes
from natgrad.linalg.results import Number
from natgrad.operators import Lanczos, Operator, Problem, block_norms
from natgrad.operators.base import SMALL
from natgrad.tables import Column, Table

_ROUGH = Lanczos(tolerance=1e-2)  # for pictures of large matrices
_SAMPLED = 64  # products a layer, from which norms of large blocks are estimated


@dataclass(frozen=True)
class WantedFindings:
    matrices: list[str]
    structures: list[str]
    measures: list[str]
    eigenvalues: int
    damping: float
    draws: int
    seed: int


@dataclass
class Findings:
    """``numbers`` grows with what is found; ``drawn`` names the pictures."""

    problem: Problem
    wanted: WantedFindings
    title: str
    numbers: dict[str, Any] = field(default_factory=dict)
    drawn: list[str] = field(default_factory=list)
    operators: dict[str, Operator] = field(default_factory=dict)

    def tables(self) -> Iterator[Table]:
        yield self._about()
        size = sizes(self.problem)
        self.numbers["sizes"] = size.entries()
        yield size.table()
        found = list(self._matrices())
        yield matrices.table(found)
        more = [
            (
                f"trace of {one.name}",
                [matrices.text(one.layers[layer.name]) for layer in size.layers],
            )
            for one in found
            if one.structure == found[0].structure  # the first that was asked for
        ]
        yield layers_table(size.layers, more)
        if self.wanted.measures:
            yield self._measures()

    def _about(self) -> Table:
        problem = self.problem
        with terminal.status("Loss and gradient"):
            self.accuracy = accuracy(problem)
            facts = {
                "samples": problem.samples,
                "parameters": problem.space.size,
                "loss": problem.value(),
                "gradient norm": float(problem.gradient().norm()),
                "accuracy": self.accuracy,
            }
        self.numbers |= {"title": self.title, "damping": self.wanted.damping, **facts}
        shown = {name: value for name, value in facts.items() if value is not None}
        cells = tuple(f"{v:,}" if isinstance(v, int) else f"{v:.6g}" for v in shown.values())
        return Table(self.title, tuple(Column(name, "right") for name in shown), (cells,))

    def _matrices(self) -> Iterator[matrices.Matrix]:
        want = self.wanted
        jobs = [(m, s) for m in want.matrices for s in want.structures]
        for matrix, structure in terminal.track(jobs, "Matrices"):
            kept = matrix_words.structure(structure)
            made = matrix_words.matrix(matrix, self.problem, kept, want.draws, want.seed)
            operator = written(made)
            label = letter = matrix_words.MATRICES[matrix].letter
            if structure != matrix_words.FULL:
                label += f", {structure}"
            self.operators[label] = operator
            found = matrices.measure(
                operator,
                letter,
                structure,
                k=want.eigenvalues,
                damping=want.damping,
                seed=want.seed,
            )
            self.numbers.setdefault("matrices", []).append(
                {
                    "matrix": matrix,
                    "structure": structure,
                    "trace": plain(found.trace),
                    "norm": plain(found.norm),
                    "largest": _pairs(found.largest),
                    "smallest": _pairs(found.smallest),
                    "condition": plain(found.condition),
                    "layers": {name: plain(trace) for name, trace in found.layers.items()},
                }
            )
            yield found

    def _measures(self) -> Table:
        known = self.operators.get("H")
        given = measure_tables.Given(self.problem, known, self.wanted.damping, self.wanted.seed)
        lines: list[measure_tables.MeasureLine] = []
        for name in terminal.track(self.wanted.measures, "Measures"):
            lines += measure_tables.measure(name, given)
        self.numbers["measures"] = {
            one.name: {"why": one.about} if one.value is None else plain(one.value) for one in lines
        }
        return measure_tables.table(lines)

    # Pictures.

    def draw(self, folder: Path) -> None:
        spectra, layers, blocks = [], [], []
        want = self.wanted
        for name, operator in terminal.track(list(self.operators.items()), "Pictures"):
            small = operator.closed or operator.size <= SMALL
            top = operator.eigenvalues(min(want.eigenvalues, operator.size)).values
            spectra.append(pictures.NamedSpectrum(name, operator.spectrum(seed=want.seed), top))
            each = {
                layer: part.eigenvalues(
                    min(2 * want.eigenvalues, part.size), by=Lanczos() if small else _ROUGH
                ).values
                for layer, part in operator.layers().items()
            }
            layers.append(pictures.LayerSpectra(name, each))
            if not operator.closed:  # of which all blocks but those on the diagonal are zero
                norms = block_norms(operator, 0 if small else _SAMPLED, want.seed)
                blocks.append(pictures.BlockNorms(name, *norms))
        pictures.spectra(spectra, self._picture(folder, "spectra"))
        pictures.layer_spectra(layers, self._picture(folder, "layers"))
        if blocks:
            pictures.block_norms(blocks, self._picture(folder, "blocks"))

    def _picture(self, folder: Path, name: str) -> Path:
        self.drawn.append(f"{name}.png")
        return folder / f"{name}.png"

    # Approximations.

    def check_quality(self, target: float) -> None:
        """Before anything takes long."""
        quality.check(self.problem, self.wanted.damping)
        if target > 1:
            raise SettingError(
                f"--target-accuracy is {target:g} but must be at most 1: pass a share such as 0.9."
            )
        now = accuracy(self.problem)
        if now is None:
            raise SettingError(
                f"--quality trains to an accuracy but {type(self.problem.loss).__name__} has none: "
                "pass --loss cross-entropy, or leave it out."
            )
        if now >= target:
            raise SettingError(
                f"--target-accuracy is {target:g} but the model is at {now:.3f} already: pass a "
                "higher one, or other weights."
            )

    def compare(self, target: float, folder: Path | None) -> list[Table]:
        want = self.wanted
        with terminal.status(f"Training to an accuracy of {target:g}"):
            trained, steps = train(self.problem, target)
            after = accuracy(trained)
        assert after is not None
        if after < target:
            raise SettingError(
                f"--target-accuracy is {target:g} but after {LIMIT} steps the model is at "
                f"{after:.3f}: pass a lower one, or weights that are further trained."
            )
        found = []
        for problem in (self.problem, trained):
            label = f"accuracy {accuracy(problem):.2f}"
            found.append(
                quality.quality(
                    problem, label, damping=want.damping, draws=want.draws, seed=want.seed
                )
            )
        self.numbers["quality"] = [asdict(one) for one in found]
        self.numbers["training steps"] = steps
        if folder is not None:
            pictures.approximation(found, self._picture(folder, "quality"))
            pictures.approximation_of_fisher(found, self._picture(folder, "quality-fisher"))
        return [quality.table(one) for one in found]


def plain(value: Any) -> Any:
    """As JSON knows it: what is not finite is ``None``."""
    if isinstance(value, Number):
        return {
            "value": plain(float(value)),
            "standard_error": plain(value.standard_error),
            "method": value.method,
            "products": value.products,
        }
    if isinstance(value, Tensor):
        return [plain(one) for one in value.detach().to("cpu", torch.float64).tolist()]
    return value if not isinstance(value, float) or isfinite(value) else None


def _pairs(found: Any) -> dict[str, Any]:
    return {
        "values": plain(found.values),
        "residuals": plain(found.residuals),
        "converged": found.converged,
        "method": found.method,
        "products": found.products,
    }
