"""Measures by name, each as lines of a table; one that is not defined here says why."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from natgrad.cli import matrix_words
from natgrad.errors import NatgradError
from natgrad.lab.report.dense_cache import written
from natgrad.lab.report.matrix_tables import text
from natgrad.linalg.results import Number
from natgrad.measures import (
    Signs,
    fisher_rao,
    gradient_variance,
    noise_scale,
    pac_bayes,
    path_norm,
    sharpness,
    spectral_bound,
    tic,
)
from natgrad.operators import Operator, Problem, ggn, hessian
from natgrad.operators.base import SMALL
from natgrad.structures import Kronecker
from natgrad.tables import Column, Table


@dataclass(frozen=True)
class MeasureLine:
    """``value`` is ``None`` where there is none, and ``about`` says why."""

    name: str
    value: Number | None
    about: str


@dataclass(frozen=True)
class Given:
    """What measures are read from; ``by`` estimates traces over samples where there are many.

    ``known``: the Hessian, if it was made for other reasons.
    """

    problem: Problem
    known: Operator | None
    damping: float
    seed: int

    @cached_property
    def hessian(self) -> Operator:
        return written(hessian(self.problem)) if self.known is None else self.known

    @property
    def large(self) -> bool:
        return self.problem.space.size > SMALL

    @property
    def by(self) -> Signs | None:
        return Signs(seed=self.seed) if self.large else None


Measure = Callable[[Given], Iterator[MeasureLine]]


def _noise(given: Given) -> Iterator[MeasureLine]:
    found = noise_scale(given.problem, matrix=given.hessian, by=given.by)
    yield MeasureLine("B_simple", Number(found.simple), "tr Σ / |g|²: the noise scale in samples")
    yield MeasureLine("B_noise", found.curved, "tr(HΣ) / gᵀHg: the critical batch size")


def _tic(given: Given) -> Iterator[MeasureLine]:
    structure = Kronecker() if given.large else None
    matrix = written(ggn(given.problem, structure=structure))
    found = tic(given.problem, matrix=matrix, damping=given.damping, by=given.by)
    which = "G as Kronecker products" if structure else "G"
    yield MeasureLine(
        "TIC", found.value, f"loss + tr(G⁻¹C)/N, with {which}, damping {given.damping:g}"
    )
    yield MeasureLine("tr(G⁻¹C)", found.trace, "how many parameters count")


def _fisher_rao(given: Given) -> Iterator[MeasureLine]:
    yield MeasureLine("Fisher-Rao norm", fisher_rao(given.problem), "θᵀFθ")


def _sharpness(given: Given) -> Iterator[MeasureLine]:
    found = sharpness(given.problem, matrix=given.hessian)
    yield MeasureLine("sharpness", Number(found.largest), "λ max of H: rates below 2/λ are stable")
    where = f"of the loss within {found.rise.region.radius:g} of the weights"
    yield MeasureLine("largest rise", Number(found.rise.height), where)


def _variance(given: Given) -> Iterator[MeasureLine]:
    found = gradient_variance(given.problem)
    yield MeasureLine("gradient variance", Number(found.total), "tr Σ, over samples")


def _path_norm(given: Given) -> Iterator[MeasureLine]:
    yield MeasureLine("path norm", Number(path_norm(given.problem)), "(Σ over paths of Π w²)^½")


def _spectral(given: Given) -> Iterator[MeasureLine]:
    found = spectral_bound(given.problem)
    yield MeasureLine("Lipschitz bound", Number(found.lipschitz), "Π of the layers' spectral norms")
    yield MeasureLine(
        "spectral complexity", Number(found.complexity), "that, times how far rows are"
    )


def _pac_bayes(given: Given) -> Iterator[MeasureLine]:
    found = pac_bayes(given.problem, seed=given.seed)
    yield MeasureLine("weight noise", Number(found.sigma), "σ with which the error rises by 0.1")
    yield MeasureLine(
        "PAC-Bayes bound", Number(found.seeger), "Seeger's, of the error with that noise"
    )


MEASURES: dict[str, Measure] = {
    "noise": _noise,
    "tic": _tic,
    "fisher-rao": _fisher_rao,
    "sharpness": _sharpness,
    "variance": _variance,
    "path-norm": _path_norm,
    "spectral": _spectral,
    "pac-bayes": _pac_bayes,
}
NAMES = tuple(MEASURES)


def chosen(given: str) -> list[str]:
    """``"noise,tic"`` -> both; ``"all"`` -> all; none if nothing is given."""
    if given.strip() == "all":
        return list(NAMES)
    return matrix_words.chosen(given, ["all", *NAMES], "--measures") if given.strip() else []


def measure(name: str, given: Given) -> list[MeasureLine]:
    """One that is not defined here says why, and leaves the others alone."""
    try:
        return list(MEASURES[name](given))
    except NatgradError as error:
        return [MeasureLine(name, None, str(error))]


def table(lines: list[MeasureLine]) -> Table:
    columns = (Column("measure"), Column("value", "right"), Column("what it is"))
    rows = tuple(
        (one.name, "–" if one.value is None else text(one.value), one.about) for one in lines
    )
    return Table("Measures", columns, rows)
