"""The variance of gradients over samples, ``tr Σ = mean_n |s_n - g|²``, ``g = mean_n s_n``.

One of the measures of Jiang et al. 2020. It is small at the end of a training that generalises;
during training it says how many samples a step should see (`noise_scale`).
By parameter it shows which layers are noisy.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from natgrad.errors import CoverageError
from natgrad.measures.centred_gradients import centred_squares
from natgrad.operators import Problem
from natgrad.tables import Column, Table


@dataclass(frozen=True)
class GradientVariance:
    """The variance of per-sample gradients, in total and by parameter.

    Arguments:
        total: ``tr Σ``, the sum of the variances of all parameters.
        gradient: ``|g|²``, of the mean gradient.
        samples: ``N``.
        parameters: ``P``, the number of single parameters.
        parts: by parameter name, the pair ``(variance, gradient²)`` that it adds to ``total`` and
            ``gradient``.
    """

    total: float
    gradient: float
    samples: int
    parameters: int
    parts: Mapping[str, tuple[float, float]]

    @property
    def mean(self) -> float:
        """Of a single parameter."""
        return self.total / self.parameters

    @property
    def unbiased(self) -> float:
        """``tr Σ`` of what the samples were drawn from: ``N / (N - 1)`` times ``total``."""
        return self.total * self.samples / (self.samples - 1) if self.samples > 1 else float("nan")

    def table(self) -> Table:
        columns = (
            Column("parameter"),
            Column("variance", "right"),
            Column("share", "right"),
            Column("gradient²", "right"),
        )
        whole = self.total or 1.0
        rows = tuple(
            (name, f"{v:.4g}", f"{100 * v / whole:.1f}%", f"{g:.4g}")
            for name, (v, g) in self.parts.items()
        )
        footer = f"all: variance {self.total:.4g}, gradient² {self.gradient:.4g}"
        return Table(f"Gradients of {self.samples:,} samples", columns, rows, footer)

    def __str__(self) -> str:
        return str(self.table())


def gradient_variance(
    model: nn.Module | Problem,
    loss: Any = None,
    data: Any = None,
    *,
    parameters: Iterable[str] | str | None = None,
) -> GradientVariance:
    """Exact, in two passes over the data: the mean first, then deviations from it.

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
    """
    problem = Problem.of(model, loss, data, parameters=parameters)
    g, v = moments(problem)
    parts = {
        name: (float(v[part].sum()), float(g[part].square().sum()))
        for name, part in problem.space.slices.items()
    }
    return GradientVariance(
        float(v.sum()), float(g.square().sum()), problem.samples, problem.space.size, parts
    )


def moments(problem: Problem) -> tuple[Tensor, Tensor]:
    """Mean ``g [P]`` and variances ``diag Σ [P]`` of the gradients, in float64.

    ``mean_n s_n² - g²`` would be the difference of two large numbers where the mean is large, so g
    is taken off first.

    Arguments:
        problem: model, loss and data.
    """
    g = problem.gradient()
    try:
        squares = centred_squares(problem, g)
    except CoverageError:  # some layer is not known: whole gradients, a sample at a time
        squares = torch.zeros_like(g, dtype=torch.float64)
        for rows in problem.sample_gradients():
            squares += (rows - g).double().square().sum(0)
        squares = problem.totals(squares) / problem.samples
    return g.double(), squares
