"""Words for matrices, structures and losses, and the objects that they stand for."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from natgrad.curvature.losses import Loss
from natgrad.errors import SettingError
from natgrad.lab import registry
from natgrad.lab.names import CURVATURES, LOSSES, STRUCTURES, CurvatureRequest
from natgrad.lab.registry import PATH, Registry, is_path
from natgrad.operators import Operator, Problem, fisher, ggn, hessian
from natgrad.structures import Structure

FULL = "full"  # all of the matrix, which no structure stands for


@dataclass(frozen=True)
class NamedMatrix:
    """``make`` takes a problem, a structure or None, and how targets are drawn."""

    letter: str
    make: Callable[[Problem, Structure | None, CurvatureRequest], Operator]


def _fisher(curvature: str) -> Callable[[Problem, Structure | None, CurvatureRequest], Operator]:
    return lambda problem, structure, asked: fisher(
        problem, structure=structure, curvature=CURVATURES[curvature](asked)
    )


def _own_matrix(path: str, found: Any) -> NamedMatrix:
    """A function of a problem and a structure."""
    function = registry.function(path, "Matrix", "an Operator", found)
    takes = "takes a problem and a structure"

    def make(problem: Problem, structure: Structure | None, asked: CurvatureRequest) -> Operator:
        kind: type[Any] = Operator
        made: Operator = registry.call(
            function, path, "Matrix", kind, problem, structure, takes=takes
        )
        return made

    return NamedMatrix(path.rpartition(":")[2], make)


MATRICES: Registry[NamedMatrix] = Registry(
    "matrix",
    "a function (problem, structure) that returns an Operator",
    _own_matrix,
    {
        "hessian": NamedMatrix("H", lambda p, structure, _: hessian(p, structure=structure)),
        "ggn": NamedMatrix("G", lambda p, structure, _: ggn(p, structure=structure)),
        "fisher": NamedMatrix("F", lambda p, structure, _: fisher(p, structure=structure)),
        "mc": NamedMatrix("F_mc", _fisher("monte-carlo")),
        "empirical": NamedMatrix("C", _fisher("empirical")),
    },
)


def matrix(
    name: str, problem: Problem, structure: Structure | None, draws: int, seed: int
) -> Operator:
    return MATRICES[name].make(problem, structure, CurvatureRequest(draws=draws, seed=seed))


def structure(name: str) -> Structure | None:
    """None is all of the matrix."""
    return None if name == FULL else STRUCTURES[name]()


def loss(name: str) -> Loss:
    """A named one, or that of ``module:function``, which takes output and target."""
    return LOSSES[name]()


def matrices(given: str) -> list[str]:
    return chosen(given, MATRICES, "--matrix", open=True)


def structures(given: str) -> list[str]:
    return chosen(given, (FULL, *STRUCTURES), "--structure", open=True)


def chosen(given: str, known: Iterable[str], option: str, *, open: bool = False) -> list[str]:
    """Words with commas between them, none twice; paths as well if it is ``open`` to them."""
    names, found = list(known), []
    for word in (part.strip() for part in given.split(",")):
        if word not in names and not (open and is_path(word)):
            own = f", or your own as {PATH}" if open else ""
            raise SettingError(
                f"{option} has {word!r}: name some of {', '.join(names)}{own}, with commas between "
                "them."
            )
        if word not in found:
            found.append(word)
    return found
