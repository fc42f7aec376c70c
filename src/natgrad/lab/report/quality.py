"""How much of a matrix its approximations keep: ``|A - B| / |B|``, and the angle between
``(A + damping I)^-1 g`` and ``(B + damping I)^-1 g`` for the gradient ``g`` (Yokota 2022).

H, F, F_mc and C, each in full, by layers, and in every structure. ``B`` is the same matrix in full,
and once more the exact Fisher in full. Matrices are written out, so this is for small models.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from natgrad.capture.discovery import StructureOf
from natgrad.curvature.fisher import EmpiricalFisher, ExactFisher, Fisher, MonteCarloFisher
from natgrad.errors import SettingError
from natgrad.operators import Operator, Problem, fisher
from natgrad.operators.hessian import Hessian
from natgrad.operators.hessian_blocks import build_hessian
from natgrad.operators.progress import track
from natgrad.structures import EKFAC, Diagonal, Full, Kronecker, Structure, UnitWise
from natgrad.tables import Column, Table, bytes_text

MATRICES = ("H", "F", "F_mc", "C")
LARGEST = 8192  # parameters, of which a matrix has 0.5 GiB in float64
STRUCTURES: dict[str, Structure | None] = {
    "full": None,
    "layer block": Full(),
    "EKFAC": EKFAC(),
    "Kronecker": Kronecker(),
    "unit-wise": UnitWise(),
    "diagonal": Diagonal(),
}


@dataclass(frozen=True)
class Distance:
    """``error`` is relative, in the Frobenius norm; ``cosine`` is that of solved gradients."""

    error: float
    cosine: float


@dataclass(frozen=True)
class Cell:
    """One structure of one matrix, apart from its ``own`` full one and from the full ``fisher``."""

    matrix: str
    structure: str
    own: Distance
    fisher: Distance


@dataclass(frozen=True)
class Quality:
    """All of them in one state of training, which ``label`` describes."""

    label: str
    damping: float
    cells: tuple[Cell, ...]

    def cell(self, matrix: str, structure: str) -> Cell:
        for one in self.cells:
            if (one.matrix, one.structure) == (matrix, structure):
                return one
        raise KeyError(f"There is no {structure!r} of {matrix!r} in {self.label!r}.")


def quality(
    problem: Problem,
    label: str,
    *,
    damping: float = 1e-3,
    draws: int = 1,
    seed: int = 0,
    structures: Sequence[str] = tuple(STRUCTURES),
    progress: bool | None = None,
) -> Quality:
    """At the weights as they are; ``draws`` targets a sample for F_mc. ``progress``: ``None`` shows
    a bar in a terminal."""
    check(problem, damping)
    unknown = [name for name in structures if name not in STRUCTURES]
    if unknown:
        raise SettingError(
            f"There is no structure {unknown[0]!r}: give some of {', '.join(STRUCTURES)}."
        )
    own, problem.progress = problem.progress, False  # one bar is enough
    try:
        steps = _steps(problem, problem.gradient(), damping, draws, seed, structures)
        count = 1 + len(MATRICES) * (1 + len(structures))
        bar = track(range(count), f"approximations, {label}", progress)
        cells = tuple(cell for _, cell in zip(bar, steps, strict=True) if cell is not None)
    finally:
        problem.progress = own
    return Quality(label, damping, cells)


def check(problem: Problem, damping: float) -> None:
    """Whether it can be done at all."""
    size = problem.space.size
    if size > LARGEST:
        raise SettingError(
            f"The model has {size:,} parameters, of which a full matrix has "
            f"{bytes_text(8 * size**2)}; full matrices are compared up to {LARGEST:,} parameters: "
            "take a smaller model, or some of its parameters."
        )
    if not damping > 0:
        raise SettingError(
            f"damping is {damping!r} but must be above 0, as some of the matrices are singular: "
            "give one such as 1e-3."
        )


def _steps(
    problem: Problem, v: Tensor, damping: float, draws: int, seed: int, structures: Sequence[str]
) -> Iterator[Cell | None]:
    """A cell a step, and ``None`` for those in which a full matrix is made."""
    exact = _Truth(fisher(problem).dense(), v, damping)
    yield None
    for name in MATRICES:
        build = _builder(name, problem, draws, seed)
        own = exact if name == "F" else _Truth(build(None).dense(), v, damping)
        if name == "H":  # whose entries would otherwise be computed again for each structure
            known = _Known(problem, own.dense)
            build = partial(build_hessian, problem, hessian=known)
        yield None
        for structure in structures:
            kept = STRUCTURES[structure]
            if kept is None:
                dense, solved = own.dense, own.solved
            else:
                operator = build(kept)
                dense, solved = operator.dense(), operator.solve(v, damping)
            yield Cell(name, structure, own.to(dense, solved), exact.to(dense, solved))


def _builder(
    name: str, problem: Problem, draws: int, seed: int
) -> Callable[[StructureOf], Operator]:
    if name == "H":
        return lambda structure: Hessian(problem)
    averaged: dict[str, Fisher] = {
        "F": ExactFisher(),
        "F_mc": MonteCarloFisher(draws, seed),
        "C": EmpiricalFisher(),
    }
    return lambda structure: fisher(problem, curvature=averaged[name], structure=structure)


class _Known(Hessian):
    """With products from its entries ``[P, P]``."""

    def __init__(self, problem: Problem, entries: Tensor) -> None:
        super().__init__(problem)
        self.entries = entries

    def product(self, v: Tensor) -> Tensor:
        return self.entries @ v


class _Truth:
    """``dense [P, P]`` and ``solved [P]``, what others are compared with."""

    def __init__(self, dense: Tensor, v: Tensor, damping: float) -> None:
        self.dense, self.norm = dense, float(dense.norm())
        # Of an indefinite matrix too, for which conjugate gradients are not made.
        damped = dense + damping * torch.eye(len(dense), dtype=dense.dtype, device=dense.device)
        self.solved: Tensor = torch.linalg.solve(damped, v)

    def to(self, dense: Tensor, solved: Tensor) -> Distance:
        apart = float((dense - self.dense).norm())
        error = apart / self.norm if self.norm else float("inf") if apart else 0.0
        lengths = float(solved.norm() * self.solved.norm())
        return Distance(error, float(solved @ self.solved) / lengths if lengths else 1.0)


def table(found: Quality) -> Table:
    """A row for each structure of each matrix."""
    rows = tuple(
        (
            cell.matrix,
            cell.structure,
            f"{cell.own.error:.3f}",
            f"{cell.own.cosine:.3f}",
            f"{cell.fisher.error:.3f}",
            f"{cell.fisher.cosine:.3f}",
        )
        for cell in found.cells
    )
    names = ("error", "cosine", "error to F", "cosine to F")
    columns = (Column("matrix"), Column("structure"), *(Column(name, "right") for name in names))
    footer = (
        "error: Frobenius, relative to the same matrix in full; cosine: of the solved gradient "
        f"with that of the full matrix, damping {found.damping:g}; to F: to the exact Fisher in "
        "full"
    )
    return Table(f"Approximations at {found.label}", columns, rows, footer)
