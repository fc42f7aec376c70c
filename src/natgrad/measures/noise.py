"""The gradient noise scale, ``B_simple = tr Σ / |g|²`` and ``B_noise = tr(HΣ) / (gᵀHg)``.

McCandlish et al. 2018.

``Σ`` is the covariance of gradients of samples, so that the gradient of a batch of B samples
is ``g`` with covariance ``Σ/B``, and a step with it and the best learning rate wins
``1 / (1 + B_noise/B)`` of what a step with all data would. Far below ``B_noise`` twice the batch is
half the steps; far above it is as many. It grows as the loss falls.

``Σ`` and ``g`` are those of the data. If these are a sample of what is trained on, ``tr Σ`` is on
average ``1 - 1/N`` of what it should be, and ``|g|²`` too large by ``tr Σ / N``;
`NoiseScale.unbiased` corrects both. Batches without replacement vary ``(N-B) / (N-1)`` as much.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from torch import nn

from natgrad.checks import POSITIVE, number
from natgrad.errors import SettingError
from natgrad.linalg.results import Number
from natgrad.measures.gradient_variance import moments
from natgrad.measures.matrix_choice import Matrix, operator_of
from natgrad.measures.sample_traces import Signs, Subset, sample_trace
from natgrad.operators import Problem, hessian


@dataclass(frozen=True)
class NoiseScale:
    """The gradient noise scale, and what it is made of.

    Arguments:
        samples: ``N``.
        variance: ``tr Σ``, of the gradients of single samples.
        gradient: ``|g|²``, of their mean.
        curved_variance: ``tr(HΣ)``, with a standard error if it was estimated; ``None`` without a
            matrix.
        curved_gradient: ``gᵀHg``; ``None`` without a matrix.
    """

    samples: int
    variance: float
    gradient: float
    curved_variance: Number | None
    curved_gradient: float | None

    @property
    def simple(self) -> float:
        """``B_simple``; infinite where there is no gradient."""
        return self.variance / self.gradient if self.gradient > 0 else inf

    @property
    def curved(self) -> Number:
        """``B_noise``; infinite where the curvature along the gradient is not above zero."""
        if self.curved_variance is None or self.curved_gradient is None:
            raise SettingError(
                "The noise scale was measured without a matrix (matrix=None), so there is no "
                "curved one: give matrix=natgrad.hessian or natgrad.ggn."
            )
        along = self.curved_gradient
        return _times(self.curved_variance, 1.0 / along if along > 0 else inf)

    @property
    def critical(self) -> float:
        """The critical batch size: ``B_noise``, or ``B_simple`` without a matrix."""
        return self.simple if self.curved_variance is None else self.curved

    def progress(self, batch: float) -> float:
        """Progress of a step on a batch relative to one on all data, ``1 / (1 + B_noise/B)``; with
        ``B_simple`` where there was no matrix.

        Arguments:
            batch: ``B > 0``, its number of samples.
        """
        size = number(batch, "batch", POSITIVE)
        return 1.0 / (1.0 + self.critical / size)

    def unbiased(self) -> "NoiseScale":
        """As estimated for all data that the samples were drawn from."""
        n = self.samples
        if n < 2:
            raise SettingError(
                f"The noise scale was measured on {n} sample, which has no variance to correct: "
                "give at least 2 samples."
            )
        variance = self.variance * n / (n - 1)
        found = replace(self, variance=variance, gradient=self.gradient - variance / n)
        if self.curved_variance is None or self.curved_gradient is None:
            return found
        curved = _times(self.curved_variance, n / (n - 1))
        left = self.curved_gradient - float(curved) / n
        return replace(found, curved_variance=curved, curved_gradient=left)

    def __str__(self) -> str:
        simple = f"B_simple {self.simple:.4g} (tr Σ {self.variance:.4g}, |g|² {self.gradient:.4g})"
        if self.curved_variance is None:
            return f"noise scale of {self.samples:,} samples: {simple}"
        return (
            f"noise scale of {self.samples:,} samples: B_noise {self.curved} "
            f"(tr HΣ {self.curved_variance}, gᵀHg {self.curved_gradient:.4g}), {simple}"
        )


def noise_scale(
    model: nn.Module | Problem,
    loss: Any = None,
    data: Any = None,
    *,
    parameters: Iterable[str] | str | None = None,
    matrix: Matrix | None = hessian,
    by: Subset | Signs | None = None,
) -> NoiseScale:
    """``tr Σ`` is exact; ``tr(HΣ)`` is exact or estimated.

    Arguments:
        model: the network, or a `Problem`, which brings loss, data and parameters along: leave
            these out then, since one given beside it raises `SettingError`. Dropout and BatchNorm
            must be in evaluation mode (``model.eval()``).
        loss: a `Loss`; torch's cross-entropy, square loss or binary cross-entropy with logits with
            ``reduction="mean"``, as a function, a module or a ``functools.partial``; or any
            function of (output, target) that returns the mean over the samples.
        data: one batch, or an iterable of batches that can be iterated again, such as a
            ``DataLoader``; an iterator is refused. A batch is ``(inputs, targets)``, where a tuple
            of inputs is passed as several arguments, or a mapping whose ``labels`` are the targets
            and whose other entries are keyword arguments of the model.
        parameters: one pattern of parameter names (``fnmatch``, such as ``"head.*"``) or several,
            each of which must match a trainable parameter; ``None`` takes all trainable parameters.
        matrix: what stands for ``H``: ``natgrad.hessian``, ``natgrad.ggn``, ``natgrad.fisher``, a
            function from a `Problem` to an operator such as ``lambda p: natgrad.ggn(p,
            structure=natgrad.Kronecker())``, or an operator over the same parameters. ``None``
            leaves ``B_noise`` out and finds ``B_simple`` alone.
        by: ``Subset(samples, seed)`` or ``Signs(probes, seed)`` to estimate the trace; ``None`` is
            exact, with one product for each sample or each parameter, whichever are fewer, and for
            each parameter on several processes.
    """
    problem = Problem.of(model, loss, data, parameters=parameters)
    g, variances = moments(problem)
    variance, square = float(variances.sum()), float(g.square().sum())
    if matrix is None:
        return NoiseScale(problem.samples, variance, square, None, None)
    operator = operator_of(matrix, problem)
    g = g.to(problem.dtype)
    curved = sample_trace(problem, operator.product, by, center=g)
    along = float((g * (operator @ g)).double().sum())
    return NoiseScale(problem.samples, variance, square, curved, along)


def _times(value: Number, factor: float) -> Number:
    if factor == inf:
        return Number(inf, value.method, 0.0, value.products)
    error = value.standard_error * factor
    return Number(float(value) * factor, value.method, error, value.products)
