"""Influence of training samples on a test loss: ``I_n = -∇L_testᵀ (H + damping I)^-1 ∇l_n``.

``L = mean_n l_n`` is the training loss, at its minimum. ``I_n`` is the derivative of the test loss
when the loss of sample n gets a little more weight: ``L + eps l_n``. Leaving the sample out is
``eps = -1/N``, so the test loss changes by about ``-I_n/N``. A negative ``I_n`` is a sample that
helps: with more of it the test loss falls, without it the test loss rises (Koh and Liang 2017).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from natgrad.checks import NOT_NEGATIVE, check_whole, number
from natgrad.errors import SettingError
from natgrad.linalg.results import Solution
from natgrad.operators import Operator, Problem, requirements


class Ranked(NamedTuple):
    """Some samples, by how strong their influence is.

    Arguments:
        scores: ``[…, k]``, the strongest first.
        samples: ``[…, k]``, positions in the training data that they are of.
    """

    scores: Tensor
    samples: Tensor


@dataclass(frozen=True, eq=False)
class Influence:
    """Scores of training samples, in the order of the data.

    Arguments:
        scores: ``I_n [N]``, or ``[tests, N]`` of pairs; on several processes those of this
            process's samples.
        count: ``N``, the training samples of all processes.
        residual: the largest relative residual of the linear systems; 0 in closed form.
        converged: whether all systems were solved to their tolerance; a result that is not is
            returned all the same.
        method: how they were solved, in words.
    """

    scores: Tensor
    count: int
    residual: float
    converged: bool
    method: str

    @property
    def leave_one_out(self) -> Tensor:
        """``-I_n/N [..., N]``: the change of the test loss if sample n is left out, and the others
        keep their weight of 1/N."""
        return -self.scores / self.count

    def helpful(self, k: int) -> Ranked:
        """The ``k`` samples that lower the test loss most, which have the lowest scores.

        Arguments:
            k: how many, from 1 to the number of training samples.
        """
        return self._top(k, largest=False)

    def harmful(self, k: int) -> Ranked:
        """The ``k`` samples that raise the test loss most, which have the highest scores.

        Arguments:
            k: how many, from 1 to the number of training samples.
        """
        return self._top(k, largest=True)

    def _top(self, k: int, largest: bool) -> Ranked:
        check_whole(k, "k", 1)
        samples = self.scores.shape[-1]
        if k > samples:
            raise SettingError(
                f"k is {k} but there are only {samples} training samples: give at most so many."
            )
        return Ranked(*self.scores.topk(k, largest=largest))


def influence(
    matrix: Operator, test: Any, *, damping: float = 0.0, preconditioner: Operator | None = None
) -> Influence:
    """``[N]``, the influence of every training sample on the mean test loss: one linear system.

    Of several processes each gets the scores of its own training samples.

    Arguments:
        matrix: the curvature of the training loss, over all parameters of its problem:
            ``natgrad.hessian(model, loss, data)``, solved by conjugate gradients, or one with a
            structure such as ``natgrad.ggn(..., structure=natgrad.EKFAC())``, in closed form. Its
            data are the training samples, and must not be shuffled.
        test: test data, one batch or an iterable of batches, judged by the training loss; or a
            `Problem` of the same model and parameters with a loss of its own. Must not be shuffled.
        damping: ``≥ 0``, added to every eigenvalue: the weight decay of the training, whose penalty
            ``damping/2 |theta|²`` the matrix does not have, and more where it is singular.
        preconditioner: an operator with a structure, close to ``matrix``, that makes conjugate
            gradients need fewer products; not used in closed form.
    """
    tested = _test(matrix, test)
    right = tested.gradient().unsqueeze(1)
    return _scored(matrix, right, damping, preconditioner, single=True)


def pairwise_influence(
    matrix: Operator, test: Any, *, damping: float = 0.0, preconditioner: Operator | None = None
) -> Influence:
    """``[tests, N]``, the influence of every training sample on the loss of every test sample.
    Their mean over tests is `influence`. Solves one system a test sample.

    Arguments:
        matrix: the curvature of the training loss, over all parameters of its problem:
            ``natgrad.hessian(model, loss, data)``, solved by conjugate gradients, or one with a
            structure such as ``natgrad.ggn(..., structure=natgrad.EKFAC())``, in closed form. Its
            data are the training samples, and must not be shuffled.
        test: test data, one batch or an iterable of batches, judged by the training loss; or a
            `Problem` of the same model and parameters with a loss of its own. Must not be shuffled.
        damping: ``≥ 0``, added to every eigenvalue: the weight decay of the training, whose penalty
            ``damping/2 |theta|²`` the matrix does not have, and more where it is singular.
        preconditioner: an operator with a structure, close to ``matrix``, that makes conjugate
            gradients need fewer products; not used in closed form.
    """
    tested = _test(matrix, test)
    what, instead = "The gradients of all test samples", "give fewer of them at a time"
    requirements.fits(tested.samples, matrix.size, matrix.dtype, what, instead)
    right = torch.cat(list(tested.sample_gradients())).mT
    return _scored(matrix, right, damping, preconditioner, single=False)


def self_influence(
    matrix: Operator, *, damping: float = 0.0, preconditioner: Operator | None = None
) -> Influence:
    """``[N]``: ``-∇l_nᵀ (H + damping I)^-1 ∇l_n``, of every training sample on its own loss.

    Never positive where the matrix has no negative eigenvalue; mislabelled and rare samples have
    the lowest scores.

    Arguments:
        matrix: the curvature of the training loss, over all parameters of its problem:
            ``natgrad.hessian(model, loss, data)``, solved by conjugate gradients, or one with a
            structure such as ``natgrad.ggn(..., structure=natgrad.EKFAC())``, in closed form. Its
            data are the training samples, and must not be shuffled.
        damping: ``≥ 0``, added to every eigenvalue: the weight decay of the training, whose penalty
            ``damping/2 |theta|²`` the matrix does not have, and more where it is singular.
        preconditioner: an operator with a structure, close to ``matrix``, that makes conjugate
            gradients need fewer products; not used in closed form.
    """
    damping = number(damping, "damping", NOT_NEGATIVE)
    train = _train(matrix)
    scores, ends = [], []
    for rows in train.sample_gradients():
        found = _solved(matrix, rows.mT, damping, preconditioner)
        scores.append(-(rows * found.x.mT).sum(1))
        ends.append(found)
    worst = max((float(end.residuals.max()) for end in ends), default=0.0)
    converged = all(end.converged for end in ends)
    return Influence(torch.cat(scores), train.samples, worst, converged, ends[-1].method)


def _scored(
    matrix: Operator,
    right: Tensor,
    damping: float,
    preconditioner: Operator | None,
    *,
    single: bool,
) -> Influence:
    train = _train(matrix)
    damping = number(damping, "damping", NOT_NEGATIVE)
    found = _solved(matrix, right, damping, preconditioner)
    scores = -torch.cat([rows @ found.x for rows in train.sample_gradients()]).mT
    worst = float(found.residuals.max())
    scores = scores[0] if single else scores
    return Influence(scores, train.samples, worst, found.converged, found.method)


def _solved(
    matrix: Operator, right: Tensor, damping: float, preconditioner: Operator | None
) -> Solution:
    """``(matrix + damping I)^-1 right`` for ``right [P, k]``."""
    right = right.to(matrix.dtype)
    if matrix.closed:
        zero = torch.zeros(right.shape[1], dtype=matrix.dtype)
        return Solution(matrix.solve(right, damping), zero, True, 0, "exact: in closed form")
    return matrix.cg(right, damping, preconditioner=preconditioner)


def _train(matrix: Operator) -> Problem:
    if not isinstance(matrix, Operator) or matrix.space is None:
        raise SettingError(
            f"matrix is {matrix!r} but must be an operator over all parameters of the training "
            "problem: give natgrad.hessian(model, loss, data), or one with a structure."
        )
    _check_order(matrix.problem, "training")
    return matrix.problem


def _test(matrix: Operator, test: Any) -> Problem:
    train = _train(matrix)
    options = {"parameters": train.space.names, "group": train.comm, "progress": train.progress}
    if isinstance(test, Problem):
        own = test
    else:
        own = Problem.of(train.model, train.loss, test, **options)
    _check_order(own, "test")
    if [id(p) for p in own.parameters.values()] != [id(p) for p in train.parameters.values()]:
        raise SettingError(
            f"The test problem has {own.space.size:,} parameters, which are not the "
            f"{train.space.size:,} of the training problem: make both of one model, with the same "
            "parameters=."
        )
    return own


def _check_order(problem: Problem, name: str) -> None:
    """Scores have no names but their place in the data."""
    problem.data.refuse_shuffled(f"nobody could say which {name} sample a score is of")
