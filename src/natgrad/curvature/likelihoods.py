"""What the network's output says about the target, ``-log p(y | f)``, as vectors to backpropagate.

The Fisher matrix with respect to one sample's output ``f`` is ``E[v vᵀ]`` with
``v = ∂(-log p)/∂f`` and ``y ~ p(· | f)``. A sample's log-likelihood is the sum over its positions
(tokens, pixels), which are independent given ``f``.

Every vector has the shape of the output, one row a sample, and is float32, or float64 when the
output is. Casting it to a half-precision output's type is left to the caller, who knows the loss
scale that keeps small entries alive.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from natgrad.errors import SettingError

_RESOLUTION = 2**40


class Likelihood(ABC):
    """``targets`` only says which positions count; their values are never used."""

    @abstractmethod
    def sample(
        self, output: Tensor, generator: torch.Generator, targets: Tensor | None = None
    ) -> Tensor:
        """One draw ``y ~ p(· | output)`` and its gradient ``∂(-log p(y))/∂output``, ``[n, …]``.

        Only ``generator`` is advanced, by the same amount whatever the values of output and
        targets.

        Arguments:
            output: the network's output, ``[n, …]``.
            generator: of the random numbers; one on another device than the output raises.
            targets: say which positions count (`Categorical` alone asks for that); ``None`` counts
                all.
        """

    @abstractmethod
    def exact(self, output: Tensor, targets: Tensor | None = None) -> Iterator[Tensor]:
        """Vectors ``[n, …]`` whose outer products sum, sample by sample, to the Fisher matrix.

        Arguments:
            output: the network's output, ``[n, …]``.
            targets: say which positions count (`Categorical` alone asks for that); ``None`` counts
                all.
        """

    @abstractmethod
    def passes(self, output: Tensor) -> int:
        """How many vectors `exact` yields: the backward passes it costs.

        Arguments:
            output: the network's output, ``[n, …]``.
        """

    def terms(self, output: Tensor, targets: Tensor | None = None) -> int:
        """How many terms a cross-entropy with these outputs has: samples, unless a class says
        otherwise.

        Arguments:
            output: the network's output, ``[n, …]``.
            targets: say which positions count.
        """
        return len(output)


@dataclass(frozen=True)
class Categorical(Likelihood):
    """Softmax over logits.

    Per position ``v = softmax(f) - e_y``, so that ``E[v vᵀ] = diag(p) - p pᵀ``. Targets are class
    indices as `torch.nn.functional.cross_entropy` takes them, or class probabilities.

    Arguments:
        class_axis: axis of the classes in the output: 1 for ``[n, C]`` and ``[n, C, …]``, -1 for
            ``[n, …, C]``; 0, the samples, raises.
        ignore_index: target index of positions that do not count.
    """

    class_axis: int = 1
    ignore_index: int = -100

    def __post_init__(self) -> None:
        for field in ("class_axis", "ignore_index"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool):
                raise SettingError(
                    f"Categorical.{field} is {value!r} but must be a whole number: pass an int."
                )
        if self.class_axis == 0:
            raise SettingError(
                "Categorical.class_axis is 0, which is the axis of the samples, but must be "
                "another: pass 1 for outputs [n, C, ...] or -1 for [n, ..., C]."
            )

    def sample(
        self, output: Tensor, generator: torch.Generator, targets: Tensor | None = None
    ) -> Tensor:
        v = self._probabilities(output)
        drawn = _draw(v, generator)
        v.scatter_(-1, drawn, v.gather(-1, drawn) - 1)
        ignored = self._ignored(output, targets)
        if ignored is not None:
            v.masked_fill_(ignored.unsqueeze(-1), 0)
        return v.movedim(-1, self._axis(output))

    def exact(self, output: Tensor, targets: Tensor | None = None) -> Iterator[Tensor]:
        """``√p_c (p - e_c)`` for one class ``c`` at one position at a time, zero elsewhere."""
        p = self._probabilities(output)
        axis = self._axis(output)
        roots = p.sqrt()
        ignored = self._ignored(output, targets)
        if ignored is not None:
            roots.masked_fill_(ignored.unsqueeze(-1), 0)
        return (v.movedim(-1, axis) for v in _class_by_class(p, roots))

    def passes(self, output: Tensor) -> int:
        self._axis(output)
        return output.shape[1:].numel()

    def terms(self, output: Tensor, targets: Tensor | None = None) -> int:
        """Positions that are not ignored."""
        ignored = self._ignored(output, targets)
        positions = output.numel() // output.shape[self._axis(output)]
        return positions - (0 if ignored is None else int(ignored.sum()))

    def _axis(self, output: Tensor) -> int:
        if output.dim() < 2:
            raise SettingError(
                f"Categorical needs an output [n, C, ...] or [n, ..., C] of n samples, but got the "
                f"shape {list(output.shape)}: add the axis of the samples, output.unsqueeze(0)."
            )
        axis = self.class_axis + (output.dim() if self.class_axis < 0 else 0)
        if not 1 <= axis < output.dim():
            raise SettingError(
                f"Categorical.class_axis is {self.class_axis}, but an output of shape "
                f"{list(output.shape)} has its classes on an axis from 1 to {output.dim() - 1}: "
                "pass that axis."
            )
        return axis

    def _probabilities(self, output: Tensor) -> Tensor:
        """[n, positions…, C], freshly allocated."""
        return _full(output).movedim(self._axis(output), -1).softmax(-1)

    def _ignored(self, output: Tensor, targets: Tensor | None) -> Tensor | None:
        """[n, positions…], true where a position does not count; None when all do."""
        if targets is None or (targets.is_floating_point() and targets.shape == output.shape):
            return None
        expected = list(output.shape)
        del expected[self._axis(output)]
        if list(targets.shape) != expected or targets.is_floating_point():
            raise SettingError(
                f"Categorical got {targets.dtype} targets of shape {list(targets.shape)} for an "
                f"output of shape {list(output.shape)} with its classes on axis {self.class_axis}: "
                f"pass class indices of shape {expected}, or set class_axis."
            )
        return targets.to(output.device) == self.ignore_index


@dataclass(frozen=True)
class Gaussian(Likelihood):
    """``-log p = |y - f|² / (2 variance)``.

    ``v = (f - y) / variance`` and ``E[v vᵀ] = I / variance``.

    Arguments:
        variance: finite and ``> 0``: 1 is the loss ``½ |y - f|²``, 0.5 the loss ``|y - f|²``.
    """

    variance: float = 1.0

    def __post_init__(self) -> None:
        ok = isinstance(self.variance, int | float) and not isinstance(self.variance, bool)
        if not ok or not 0 < self.variance < math.inf:
            raise SettingError(
                f"Gaussian.variance is {self.variance!r} but must be finite and above 0: "
                "pass such a number."
            )

    def sample(
        self, output: Tensor, generator: torch.Generator, targets: Tensor | None = None
    ) -> Tensor:
        f = _full(output)
        _same_device(f, generator)
        # y = f + noise √variance, so that (f - y) / variance is free of f.
        noise = torch.randn(f.shape, generator=generator, device=f.device, dtype=f.dtype)
        return noise.mul_(-(self.variance**-0.5))

    def exact(self, output: Tensor, targets: Tensor | None = None) -> Iterator[Tensor]:
        """``e_d / √variance`` for one entry ``d`` at a time."""
        f = _full(output)
        return _one_at_a_time(torch.full_like(f, self.variance**-0.5))

    def passes(self, output: Tensor) -> int:
        return _full(output).shape[1:].numel()


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """Independent yes-or-no answers with logits ``f``: `binary_cross_entropy_with_logits`.

    ``v = sigmoid(f) - y`` and ``E[v vᵀ] = diag(p (1 - p))``.
    """

    def sample(
        self, output: Tensor, generator: torch.Generator, targets: Tensor | None = None
    ) -> Tensor:
        p = _full(output).sigmoid()
        _same_device(p, generator)
        u = torch.rand(p.shape, generator=generator, device=p.device, dtype=p.dtype)
        return p - (u < p).to(p.dtype)

    def exact(self, output: Tensor, targets: Tensor | None = None) -> Iterator[Tensor]:
        """``√(p (1 - p)) e_d`` for one entry ``d`` at a time."""
        f = _full(output)
        # 1 - sigmoid(f) would lose all digits for large f.
        return _one_at_a_time((f.sigmoid() * (-f).sigmoid()).sqrt())

    def passes(self, output: Tensor) -> int:
        return _full(output).shape[1:].numel()

    def terms(self, output: Tensor, targets: Tensor | None = None) -> int:
        """Every entry is one."""
        return output.numel()


def precise(output: Tensor, what: str) -> Tensor:
    """The output, with its graph, in float32 or better.

    Arguments:
        output: the network's output, ``[n, …]``; whole numbers and single numbers raise.
        what: ``"likelihood"`` or ``"loss"``, for error sentences.
    """
    if not output.is_floating_point():
        raise SettingError(
            f"A {what} needs real floating-point outputs, but got {output.dtype}: pass the "
            "network's output before any argmax or rounding."
        )
    if output.dim() == 0:
        raise SettingError(
            f"A {what} needs an output [n, ...] of n samples, but got a single number: "
            "pass the network's output and not the loss."
        )
    return output.to(torch.promote_types(output.dtype, torch.float32))


def _full(output: Tensor) -> Tensor:
    return precise(output.detach(), "likelihood")


def _same_device(output: Tensor, generator: torch.Generator) -> None:
    ours, theirs = output.device, generator.device
    if ours.type != theirs.type or (None not in (ours.index, theirs.index) and ours != theirs):
        raise SettingError(
            f"The output is on {ours} but the generator on {theirs}: "
            f'make the generator with torch.Generator("{ours}").'
        )


def _draw(p: Tensor, generator: torch.Generator) -> Tensor:
    """Indices ``[…, 1]`` drawn with the probabilities ``p [..., C]``.

    The cumulative sum is over integers: exact, the same on every device and allowed together with
    `torch.use_deterministic_algorithms`. Unlike `torch.multinomial` it does not fail on NaN, which
    must reach the statistics to be dropped there.
    """
    _same_device(p, generator)
    cumulated = p.mul(_RESOLUTION).to(torch.int64).cumsum(-1)
    shape = (*p.shape[:-1], 1)
    u = torch.randint(_RESOLUTION, shape, generator=generator, device=p.device)
    # The sum misses _RESOLUTION by rounding; the last class with any weight takes the rest.
    u = torch.minimum(u, cumulated[..., -1:] - 1)
    return torch.searchsorted(cumulated, u, right=True).clamp_(0, p.shape[-1] - 1)


def _class_by_class(p: Tensor, roots: Tensor) -> Iterator[Tensor]:
    """``roots_c (p - e_c)`` position by position; all are shaped ``[n, positions…, C]``."""
    n, classes = p.shape[0], p.shape[-1]
    # Not -1 for the positions, which an empty batch leaves undetermined.
    shape = (n, p.shape[1:-1].numel(), classes)
    rows, weights = p.reshape(shape), roots.reshape(shape)
    for position in range(rows.shape[1]):
        for c in range(classes):
            v = torch.zeros_like(rows)
            v[:, position] = rows[:, position]
            v[:, position, c] -= 1
            v[:, position] *= weights[:, position, c, None]
            yield v.reshape(p.shape)


def _one_at_a_time(scale: Tensor) -> Iterator[Tensor]:
    """``scale [n, …]`` with all entries but one of each row set to zero, for each entry."""
    columns = scale.reshape(scale.shape[0], scale.shape[1:].numel())
    for d in range(columns.shape[1]):
        v = torch.zeros_like(columns)
        v[:, d] = columns[:, d]
        yield v.reshape(scale.shape)
