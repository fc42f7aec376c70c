"""Second-order steps for small models, ``(F + damping I)^-1 ∇L``, and their relatives.

natural gradient     ``(F + λ I)^-1 ∇L``, from the dense matrix
Gauss-Newton         ``(Jᵀ Λ J / W + λ I)^-1 ∇L``, matrix-free or with a structure
Gram-Gauss-Newton    ``Jᵀ (Λ J Jᵀ / W + λ I)^-1 r / W`` with ``r = ∂total/∂outputs``
powers               ``(F + λ I)^-a ∇L``: gradient descent at ``a = 0``, natural gradient at 1

The Gram form equals the Gauss-Newton step, but solves a system with one unknown for every sample
and output instead of one for every parameter (Cai et al. 2019; Yokota 2022). The powers are those
of Amari et al. 2021. All are directions to go
against: ``theta <- theta - lr update``, which is ``apply_``.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.checks import NOT_NEGATIVE, Range, number
from natgrad.errors import SettingError
from natgrad.operators.base import Operator
from natgrad.operators.jacobian import jacobian
from natgrad.operators.outer import OuterProducts
from natgrad.operators.problem import Problem
from natgrad.operators.space import ParameterSpace, Vector, chosen
from natgrad.operators.vectors import Roots

_POWERS = Range(low=0, high=1)


def natural_gradient(fisher: Operator, damping: float = 0.0, gradient: Vector | None = None) -> Any:
    """``(F + damping I)^-1 ∇L`` by a Cholesky factor of the dense matrix: the ground truth.

    Arguments:
        fisher: the matrix; any operator that is small enough to be written out (2 GiB).
        damping: ``λ ≥ 0``, added to every eigenvalue; a matrix that is singular or indefinite with
            it raises `SettingError`.
        gradient: ``∇L`` of another batch than the matrix is of, flat ``[P]`` or a dict by parameter
            name; the step is then of the same kind. ``None`` computes that of the matrix's own
            data, and the step is flat.
    """
    damping = number(damping, "damping", NOT_NEGATIVE)
    matrix = fisher.dense().clone()
    matrix.diagonal().add_(damping)
    factor, failed = torch.linalg.cholesky_ex(matrix)
    pivots = factor.diagonal().square()
    if int(failed) or _singular(pivots):
        raise _no_inverse(fisher.kind, damping)

    def solve(v: Tensor) -> Tensor:
        found: Tensor = torch.cholesky_solve(v, factor)
        return found

    return fisher._like(_gradient(fisher, gradient), solve)


def gauss_newton(
    ggn: Operator,
    damping: float = 0.0,
    gradient: Vector | None = None,
    *,
    preconditioner: Operator | None = None,
) -> Any:
    """``(G + damping I)^-1 ∇L``, as ``ggn.solve`` does it: in closed form or by iterating.

    Arguments:
        ggn: the matrix, with or without a structure.
        damping: ``λ ≥ 0``, added to every eigenvalue.
        gradient: ``∇L`` of another batch than the matrix is of, flat ``[P]`` or a dict by parameter
            name; the step is then of the same kind. ``None`` computes that of the matrix's own
            data, and the step is flat.
        preconditioner: an operator with a structure, close to ``ggn``, that makes conjugate
            gradients need fewer products; not used where ``ggn`` has a structure.
    """
    damping = number(damping, "damping", NOT_NEGATIVE)
    return ggn.solve(_gradient(ggn, gradient), damping, preconditioner)


def powered_gradient(
    fisher: Operator, exponent: float, damping: float = 0.0, gradient: Vector | None = None
) -> Any:
    """``(F + damping I)^-exponent ∇L``.

    Arguments:
        fisher: the matrix, with or without a structure.
        exponent: from 0, the gradient itself, to 1, the natural gradient; others raise.
        damping: ``λ ≥ 0``, added to every eigenvalue.
        gradient: ``∇L`` of another batch than the matrix is of, flat ``[P]`` or a dict by parameter
            name; the step is then of the same kind. ``None`` computes that of the matrix's own
            data, and the step is flat.
    """
    exponent = number(exponent, "exponent", _POWERS)
    damping = number(damping, "damping", NOT_NEGATIVE)
    return fisher.power(_gradient(fisher, gradient), -exponent, damping)


def gram_gauss_newton(ggn: Operator, damping: float = 0.0) -> Tensor:
    """The Gauss-Newton step ``[P]`` from a system of ``N D`` outputs, not of ``P`` parameters.

    Equal to ``gauss_newton`` by ``(Jᵀ Λ J + λ)^-1 Jᵀ = Jᵀ (Λ J Jᵀ + λ)^-1``, and cheaper where
    there are fewer outputs than parameters. Without damping it is the shortest of all
    Gauss-Newton steps where ``G`` is singular and the system is not.

    Arguments:
        ggn: ``natgrad.ggn(...)`` without a structure, on one process and without shuffling.
        damping: ``λ ≥ 0``, added to every eigenvalue. 0 is allowed where the system of outputs is
            regular.
    """
    damping = number(damping, "damping", NOT_NEGATIVE)
    if not isinstance(ggn, OuterProducts) or not isinstance(ggn.vectors, Roots):
        raise SettingError(
            f"Gram-Gauss-Newton needs the whole Gauss-Newton matrix but got {ggn!r}: give "
            "natgrad.ggn(model, loss, data) without a structure, or use gauss_newton."
        )
    problem = ggn.problem
    problem.data.refuse_shuffled("two passes would see other samples at a place")
    own = jacobian(problem)
    gram = own.gram()
    system, right = torch.empty_like(gram), gram.new_empty(len(gram), 1)
    start = 0
    for batch in problem.batches("output gradients"):
        f = problem.output(batch).detach().requires_grad_()
        with torch.enable_grad():
            (r,) = torch.autograd.grad(problem.loss.total(f, batch.targets), f)
        here = slice(start, start + f.numel())
        columns = gram[here].mT.reshape(-1, *f.shape)
        curved = problem.loss.curve(f.detach(), batch.targets, columns)
        system[here] = curved.reshape(len(gram), -1).mT
        right[here, 0] = r.flatten().to(right)
        start += f.numel()
    system /= problem.weight
    system.diagonal().add_(damping)
    factor, order, failed = torch.linalg.lu_factor_ex(system)
    if int(failed) or _singular(factor.diagonal().abs()):
        raise _no_inverse("The matrix of Gram-Gauss-Newton", damping)
    solved = torch.linalg.lu_solve(factor, order, right / problem.weight)
    return own.combined(solved).squeeze(1)


@torch.no_grad()
def apply_(model: nn.Module | Problem, update: Vector, lr: float = 1.0) -> None:
    """``theta <- theta - lr update``, in place.

    Arguments:
        model: a network, for an update of all its trainable parameters, or a `Problem`, for one of
            the problem's parameters.
        update: flat ``[P]``, or a dict with a tensor for every one of these parameters.
        lr: the learning rate: what the update is multiplied by.
    """
    own = model.parameters if isinstance(model, Problem) else chosen(model, None)
    assert isinstance(own, Mapping)
    space = ParameterSpace(own)
    if isinstance(update, Tensor):
        if update.shape != (space.size,):
            raise SettingError(
                f"The update has the shape {list(update.shape)} but there are {space.size:,} "
                f"parameters: give [{space.size}] or a dict by name."
            )
        flat = update
    else:
        flat = space.flat(update)
    for name, part in space.named(flat).items():
        own[name].sub_(part.to(own[name]), alpha=lr)


def _gradient(operator: Operator, gradient: Vector | None) -> Any:
    return operator.problem.gradient() if gradient is None else gradient


def _singular(pivots: Tensor) -> bool:
    """Whether the smallest is what rounding leaves of a zero."""
    limit = float(pivots.max()) * torch.finfo(pivots.dtype).eps * len(pivots)
    return not bool(pivots.isfinite().all()) or float(pivots.min()) <= limit


def _no_inverse(what: str, damping: float) -> SettingError:
    return SettingError(
        f"{what} with damping {damping:g} is singular, so there is no step: give a larger damping."
    )
