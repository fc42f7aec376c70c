"""Words for matrices, structures and losses, and the objects that they stand for."""

from collections.abc import Callable
from enum import StrEnum
from typing import TypeVar

from natgrad.cli import imports
from natgrad.curvature.fisher import EmpiricalFisher, MonteCarloFisher
from natgrad.curvature.losses import BinaryCrossEntropy, CrossEntropy, Loss, SquareLoss, as_loss
from natgrad.errors import SettingError
from natgrad.operators import Operator, Problem, fisher, ggn, hessian
from natgrad.structures import EKFAC, Diagonal, Full, Kronecker, Structure, UnitWise

W = TypeVar("W", bound=StrEnum)


class MatrixName(StrEnum):
    HESSIAN = "hessian"
    GGN = "ggn"
    FISHER = "fisher"
    MC = "mc"
    EMPIRICAL = "empirical"

    @property
    def letter(self) -> str:
        return {"hessian": "H", "ggn": "G", "fisher": "F", "mc": "F_mc"}.get(self.value, "C")

    def made(
        self, problem: Problem, structure: Structure | None, draws: int, seed: int
    ) -> Operator:
        match self:
            case MatrixName.HESSIAN:
                return hessian(problem, structure=structure)
            case MatrixName.GGN:
                return ggn(problem, structure=structure)
            case MatrixName.FISHER:
                return fisher(problem, structure=structure)
            case MatrixName.MC:
                drawn = MonteCarloFisher(draws, seed)
                return fisher(problem, structure=structure, curvature=drawn)
            case MatrixName.EMPIRICAL:
                return fisher(problem, structure=structure, curvature=EmpiricalFisher())


class StructureName(StrEnum):
    FULL = "full"
    BLOCK = "block"
    KRONECKER = "kronecker"
    REDUCE = "kronecker-reduce"
    EKFAC = "ekfac"
    UNITWISE = "unitwise"
    DIAGONAL = "diagonal"

    def made(self) -> Structure | None:
        kept: dict[StructureName, Callable[[], Structure]] = {
            StructureName.BLOCK: Full,
            StructureName.KRONECKER: Kronecker,
            StructureName.REDUCE: lambda: Kronecker("reduce"),
            StructureName.EKFAC: EKFAC,
            StructureName.UNITWISE: UnitWise,
            StructureName.DIAGONAL: Diagonal,
        }
        return kept[self]() if self in kept else None


LOSSES: dict[str, Callable[[], Loss]] = {
    "cross-entropy": CrossEntropy,
    "square": SquareLoss,
    "binary": BinaryCrossEntropy,
}


def loss(name: str) -> Loss:
    """A named one, or that of ``module:function``, which takes output and target."""
    if name in LOSSES:
        return LOSSES[name]()
    if not imports.is_path(name):
        raise SettingError(
            f"There is no loss {name!r}: name one of {', '.join(LOSSES)}, or a function of "
            "(output, target) as module:function."
        )
    return as_loss(imports.function(name, "--loss", "the mean loss over samples"))


def words(given: str, kind: type[W], option: str) -> list[W]:
    """``"hessian,ggn"`` -> both of them."""
    return [kind(word) for word in chosen(given, [str(one) for one in kind], option)]


def chosen(given: str, known: list[str], option: str) -> list[str]:
    """Words with commas between them, none twice."""
    found: list[str] = []
    for word in (part.strip() for part in given.split(",")):
        if word not in known:
            raise SettingError(
                f"{option} has {word!r}: name some of {', '.join(known)}, with commas between them."
            )
        if word not in found:
            found.append(word)
    return found
