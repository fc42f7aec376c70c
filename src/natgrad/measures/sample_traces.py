"""Traces with the gradients of samples: ``tr(A C) = mean_n s_nᵀ A s_n``, ``C = mean_n s_n s_nᵀ``.

``A`` is known by its products, which may be solves. With the mean gradient as ``center``, ``C`` is
the covariance ``Σ``. Exact, or estimated in one of two ways, both unbiased:

- ``Subset``: the mean over some samples. The error is that of a mean of ``s_nᵀ A s_n``.
- ``Signs``: ``yᵀ A y`` with ``y = N^-½ Σ_n ±s_n``, for each ``y`` a backward pass over all samples.
  The error is ``√2`` times the root mean square of ``s_nᵀ A s_m`` over pairs of samples: small if
  gradients of different samples are nearly orthogonal.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from natgrad.checks import check_whole
from natgrad.curvature.fisher import EmpiricalFisher
from natgrad.errors import SettingError
from natgrad.linalg.results import Number
from natgrad.operators import Problem, fisher, requirements
from natgrad.operators.tape import batched_grad
from natgrad.operators.vectors import LossGradients

Apply = Callable[[Tensor], Tensor]

_WIDE = 1 << 24  # numbers in the columns that are multiplied at once
_PASSES = 16  # backward passes at once


@dataclass(frozen=True)
class Subset:
    """The mean over some samples, drawn without replacement.

    Arguments:
        samples: how many, at least 2; as many as there are or more is exact. Needs all data on one
            process.
        seed: of the random numbers; the same seed gives the same result.
    """

    samples: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole(self.samples, "Subset.samples", 2)
        check_whole(self.seed, "Subset.seed", 0)


@dataclass(frozen=True)
class Signs:
    """Sums of the gradients of all samples with random signs.

    Arguments:
        probes: how many sums, at least 2, each a backward pass over all data; works on several
            processes.
        seed: of the random numbers; the same seed gives the same result.
    """

    probes: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        check_whole(self.probes, "Signs.probes", 2)
        check_whole(self.seed, "Signs.seed", 0)


def sample_trace(
    problem: Problem, apply: Apply, by: Subset | Signs | None = None, center: Tensor | None = None
) -> Number:
    """``tr(A C)``.

    Arguments:
        problem: model, loss and data.
        apply: ``A``, a function ``[P, k] -> [P, k]``.
        by: `Subset` or `Signs` to estimate it; ``None`` is exact.
        center: ``[P]``, subtracted from every gradient, such as their mean; ``None`` subtracts
            nothing.
    """
    if isinstance(by, Signs):
        each = _forms(apply, signed_sums(problem, by, center))
        said = f"{by.probes} sums of gradients with random signs"
        return _mean(each, said, 1.0)
    if isinstance(by, Subset) and by.samples < problem.samples:
        _alone(problem, "A subset of samples")
        rows = _chosen(problem, by)
        each = _forms(apply, rows if center is None else rows - center)
        rest = sqrt(1.0 - by.samples / problem.samples)
        return _mean(each, f"{by.samples} of {problem.samples} samples", rest)
    if by is not None and not isinstance(by, Subset):
        raise SettingError(
            f"by is {by!r} but must be None for the exact trace, or an estimator: give "
            "Subset(samples) or Signs(probes)."
        )
    return _exact(problem, apply, center)


def signed_sums(problem: Problem, by: Signs, center: Tensor | None = None) -> Tensor:
    """``[probes, P]``: ``N^-½ Σ_n ±(s_n - center)``.

    Arguments:
        problem: model, loss and data.
        by: how many sums, and their seed.
        center: ``[P]``, subtracted from every gradient; ``None`` subtracts nothing.
    """
    own, k = list(problem.parameters.values()), by.probes
    stream = (by.seed + 0x9E3779B1 * problem.comm.rank) % 2**32  # processes draw apart
    generator = torch.Generator().manual_seed(stream)
    sums = torch.zeros(k, problem.space.size, dtype=problem.dtype, device=problem.device)
    net = torch.zeros(k, dtype=problem.dtype, device=problem.device)
    with problem.ready():
        for index, batch in enumerate(problem.batches("random signs")):
            output = problem.output(batch)
            (v,) = LossGradients().stacks(problem.loss, output, batch, index)  # [1, n, …]
            signs = torch.randint(2, (k, batch.samples), generator=generator).to(sums) * 2 - 1
            net += signs.sum(1)
            for start in range(0, k, _PASSES):
                some = signs[start : start + _PASSES]
                stack = some.view(*some.shape, *[1] * (output.dim() - 1)) * v
                found = batched_grad(output, own, stack.to(output.dtype))
                sums[start : start + _PASSES] += problem.rows(found, len(some))
    n, weight = problem.samples, problem.weight
    sums = problem.totals(sums) * (sqrt(n) / weight)  # s_n is N/W times its part of the sum
    return sums if center is None else sums - torch.outer(problem.totals(net) / sqrt(n), center)


def _exact(problem: Problem, apply: Apply, center: Tensor | None) -> Number:
    n, size = problem.samples, problem.space.size
    if size <= n or problem.comm.size > 1:
        moment = _moment(problem, center)
        columns = _columns(size)
        parts = [apply(moment[:, part])[part].diagonal().double().sum() for part in columns]
        return Number(float(sum(parts)), "exact: from the matrix C", 0.0, size)
    requirements.fits(
        n, size, problem.dtype, "The gradients of all samples", "give by=Signs() or by=Subset()"
    )
    rows = torch.cat(list(problem.sample_gradients()))
    each = _forms(apply, rows if center is None else rows - center)
    return Number(float(each.mean()), "exact: from the gradients of all samples", 0.0, n)


def _moment(problem: Problem, center: Tensor | None) -> Tensor:
    """``C [P, P]``, or the covariance; of gradients without their mean, as ``C - g gᵀ`` would lose
    all digits where that is large."""
    whole = fisher(problem, curvature=EmpiricalFisher())
    if center is None:
        return whole.dense()
    requirements.fits(whole.size, whole.size, whole.dtype, "The covariance", "give by=Signs()")
    total = torch.zeros(whole.size, whole.size, dtype=whole.dtype, device=whole.device)
    for rows in problem.sample_gradients():
        away = rows - center
        total.addmm_(away.mT, away)
    return problem.totals(total) / problem.samples


def _forms(apply: Apply, rows: Tensor) -> Tensor:
    """``rᵀ A r [k]`` of ``rows [k, P]``, in float64."""
    width = max(1, _WIDE // rows.shape[1])
    found = []
    for start in range(0, len(rows), width):
        some = rows[start : start + width]
        found.append((some * apply(some.mT.contiguous()).mT).double().sum(1))
    return torch.cat(found).cpu()


def _columns(size: int) -> list[slice]:
    width = max(1, _WIDE // size)
    return [slice(start, min(start + width, size)) for start in range(0, size, width)]


def _chosen(problem: Problem, by: Subset) -> Tensor:
    """``[samples, P]``."""
    generator = torch.Generator().manual_seed(by.seed)
    wanted = torch.randperm(problem.samples, generator=generator)[: by.samples].sort().values
    rows, seen = [], 0
    for some in problem.sample_gradients():
        mine = wanted[(wanted >= seen) & (wanted < seen + len(some))] - seen
        rows.append(some[mine.to(some.device)])
        seen += len(some)
    return torch.cat(rows)


def _alone(problem: Problem, what: str) -> None:
    if problem.comm.size > 1:
        raise SettingError(
            f"{what} must lie in one process, but the data are spread over "
            f"{problem.comm.size}: give by=Signs(), which needs no exchange of samples."
        )


def _mean(each: Tensor, said: str, correction: float) -> Number:
    error = float(each.std()) / sqrt(len(each)) * correction
    return Number(float(each.mean()), said, error, len(each))
