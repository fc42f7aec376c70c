"""Curvature matrices of a model over data, as linear operators: H, G, F and C.

``L`` is the mean loss over all data, ``J`` the Jacobian of the model's outputs.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

from natgrad.curvature.fisher import EmpiricalFisher, ExactFisher, Fisher, MonteCarloFisher
from natgrad.operators.base import Operator
from natgrad.operators.compare import compare, cosine
from natgrad.operators.estimators import LOBPCG, Hutchinson, HutchPP, Lanczos, XTrace
from natgrad.operators.hessian import Hessian
from natgrad.operators.hessian_blocks import build_hessian
from natgrad.operators.outer import OuterProducts
from natgrad.operators.problem import Problem
from natgrad.operators.sections import block_norms, cross_block
from natgrad.operators.spectrum import Spectrum
from natgrad.operators.steps import (
    apply_,
    gauss_newton,
    gram_gauss_newton,
    natural_gradient,
    powered_gradient,
)
from natgrad.operators.structured import Structured, build
from natgrad.operators.vectors import Roots, Vectors, vectors_of
from natgrad.runtime.discovery import StructureOf

__all__ = [
    "LOBPCG",
    "HutchPP",
    "Hutchinson",
    "Lanczos",
    "Operator",
    "Problem",
    "Spectrum",
    "Structured",
    "XTrace",
    "apply_",
    "block_norms",
    "compare",
    "cosine",
    "cross_block",
    "fisher",
    "gauss_newton",
    "ggn",
    "gram_gauss_newton",
    "hessian",
    "natural_gradient",
    "powered_gradient",
]


def hessian(
    model: nn.Module | Problem,
    loss: Any = None,
    data: Any = None,
    *,
    structure: StructureOf = None,
    parameters: Iterable[str] | str | None = None,
    group: Any = None,
    progress: bool | None = None,
    check: bool = True,
) -> Operator:
    """``H = ∇²L``, matrix-free, or layer by layer with a ``structure``."""
    options = {"parameters": parameters, "group": group, "progress": progress, "check": check}
    problem = Problem.of(model, loss, data, **options)
    return Hessian(problem) if structure is None else build_hessian(problem, structure)


def ggn(
    model: nn.Module | Problem,
    loss: Any = None,
    data: Any = None,
    *,
    structure: StructureOf = None,
    parameters: Iterable[str] | str | None = None,
    group: Any = None,
    progress: bool | None = None,
    check: bool = True,
) -> Operator:
    """``G = mean Jᵀ (∂²loss/∂output²) J``, the generalised Gauss-Newton matrix."""
    options = {"parameters": parameters, "group": group, "progress": progress, "check": check}
    problem = Problem.of(model, loss, data, **options)
    return _outer(problem, Roots(), structure, "GGN")


def fisher(
    model: nn.Module | Problem,
    loss: Any = None,
    data: Any = None,
    *,
    curvature: Fisher = ExactFisher(),  # noqa: B008 (frozen)
    structure: StructureOf = None,
    parameters: Iterable[str] | str | None = None,
    group: Any = None,
    progress: bool | None = None,
    check: bool = True,
) -> Operator:
    """``F = mean E[∇log p ∇log pᵀ]``: over the model's own targets, exactly or by drawing some, or
    with ``EmpiricalFisher()`` at the targets of the data (``C``). What ``p`` is the loss says."""
    options = {"parameters": parameters, "group": group, "progress": progress, "check": check}
    problem = Problem.of(model, loss, data, **options)
    vectors = vectors_of(curvature, problem)
    names = {EmpiricalFisher: "empirical Fisher", MonteCarloFisher: "Monte-Carlo Fisher"}
    return _outer(problem, vectors, structure, names.get(type(curvature), "Fisher"))


def _outer(problem: Problem, vectors: Vectors, structure: StructureOf, kind: str) -> Operator:
    if structure is None:
        return OuterProducts(problem, vectors, kind)
    return build(problem, vectors, structure, kind)
