"""Cross-entropy, ``total = -Σ_s Σ_c t_sc log softmax(f_s)_c`` over the positions s of all samples.

With class weights w and label smoothing ε, ``t_s = (1 - ε) w_y e_y + ε w / C`` for a class index y
at position s, and ``t_s = w ∘ ((1 - ε) q + ε / C)`` for class probabilities q. Both have
``Λ_s = |t_s|₁ (diag(p_s) - p_s p_sᵀ)`` with ``p = softmax(f)``.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from natgrad.curvature.likelihoods import Categorical
from natgrad.curvature.loss import (
    Loss,
    by_sample,
    check_direction,
    check_weights,
    holds,
    precise,
)
from natgrad.errors import SettingError


@dataclass(frozen=True, eq=False)
class CrossEntropy(Loss):
    """Cross-entropy of logits, as `torch.nn.functional.cross_entropy`.

    Targets are class indices, one a position, or class probabilities shaped as the output. As in
    torch the mean is over the ``class_weights`` of the indices that count, or over all positions
    for class probabilities.

    Arguments:
        class_axis: axis of the classes in the output: 1 for ``[n, C]`` and ``[n, C, …]``, -1 for
            ``[n, …, C]``; 0, the samples, raises.
        ignore_index: target index of positions that do not count; must be negative where targets
            are class probabilities.
        class_weights: ``[C]``, a finite weight ``≥ 0`` for each class, on any device; ``None`` is 1
            for all.
        label_smoothing: ``ε`` from 0 to 1: share of the target that is spread evenly over all
            classes.
        ahead: ``k ≥ 0``: the output at position t of ``[n, T, …, C]`` predicts the target at ``t +
            k``, and the last k positions predict nothing. Causal language models whose targets are
            the inputs have 1; needs ``class_axis=-1``.
    """

    class_axis: int = 1
    ignore_index: int = -100
    class_weights: Tensor | None = None
    label_smoothing: float = 0.0
    ahead: int = 0

    def __post_init__(self) -> None:
        for field in ("class_axis", "ignore_index", "ahead"):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool):
                raise SettingError(
                    f"CrossEntropy.{field} is {value!r} but must be a whole number: pass an int."
                )
        if self.class_axis == 0:
            raise SettingError(
                "CrossEntropy.class_axis is 0, which is the axis of the samples, but must be "
                "another: pass 1 for outputs [n, C, ...] or -1 for [n, ..., C]."
            )
        smoothing = self.label_smoothing
        number = isinstance(smoothing, int | float) and not isinstance(smoothing, bool)
        if not number or not 0 <= smoothing <= 1:
            raise SettingError(
                f"CrossEntropy.label_smoothing is {smoothing!r} but must be a number from 0 to 1: "
                "pass the share that is spread over all classes."
            )
        if self.ahead < 0:
            raise SettingError(
                f"CrossEntropy.ahead is {self.ahead} but must not be below 0: pass how many "
                "positions later the target of an output stands."
            )
        if self.ahead and self.class_axis == 1:
            raise SettingError(
                f"CrossEntropy.ahead is {self.ahead}, which shifts positions on axis 1, but "
                "class_axis is 1 too: pass class_axis=-1 for outputs [n, T, C]."
            )
        check_weights("CrossEntropy.class_weights", self.class_weights)
        if self.class_weights is not None and self.class_weights.dim() != 1:
            raise SettingError(
                "CrossEntropy.class_weights has the shape "
                f"{list(self.class_weights.shape)} but must have the shape [C]: pass one weight a "
                "class."
            )

    def total(self, output: Tensor, target: Tensor) -> Tensor:
        return self._torch(output, target, "sum")

    def sample_totals(self, output: Tensor, target: Tensor) -> Tensor:
        return by_sample(self._torch(output, target, "none"))

    def weight(self, output: Tensor, target: Tensor) -> float:
        f, t, axis = self._counted(output, target)
        self._check_values(f, t, axis)
        if t.is_floating_point():
            return float(t.select(axis, 0).numel())
        if self.class_weights is None:
            return float((t != self.ignore_index).sum())
        return float(self._weights_at(f, t).sum())

    def roots(self, output: Tensor, target: Tensor) -> Iterator[Tensor]:
        """`Categorical.exact` times ``√|t_s|₁``, for one class at one position at a time."""
        f, t, axis = self._counted(output, target)
        scale = self._scale(f, t, axis).sqrt_()
        vectors = self._likelihood().exact(f, t)
        return (self._padded(v * scale, output) for v in vectors)

    def passes(self, output: Tensor) -> int:
        self._axis(output)
        return self._kept(output).shape[1:].numel()

    def stacked_roots(self, output: Tensor, target: Tensor) -> Tensor:
        f, t, axis = self._counted(output, target)
        f = f.detach()
        n, classes = f.shape[0], f.shape[axis]
        p = f.movedim(axis, -1).softmax(-1)
        scale = self._scale(f, t, axis).movedim(axis, -1)
        shape, positions = p.shape, p.shape[1:-1].numel()
        root = (p * scale).sqrt_().reshape(n, positions, classes)
        p = p.reshape(n, positions, classes)
        rows = root.movedim(-1, 0).unsqueeze(-1) * p  # [class, n, positions, C]
        rows.diagonal(dim1=0, dim2=3).sub_(root)
        if positions != 1:
            blocks = rows.new_zeros(positions, classes, n, positions, classes)
            blocks.diagonal(dim1=0, dim2=3).copy_(rows.movedim(2, -1))
            rows = blocks
        stacked = rows.reshape(positions * classes, *shape).movedim(-1, axis + 1)
        return self._padded(stacked, output)

    def draw(self, output: Tensor, target: Tensor, generator: torch.Generator) -> Tensor:
        f, t, axis = self._counted(output, target)
        v = self._likelihood().sample(f, generator, t)
        return self._padded(v * self._scale(f, t, axis).sqrt_(), output)

    def curve(self, output: Tensor, target: Tensor, u: Tensor) -> Tensor:
        """``|t_s|₁ p_s ∘ (u_s - p_s·u_s)``."""
        f, t, axis = self._counted(output, target)
        check_direction(output, u)
        if self.ahead:
            u = u.narrow(u.dim() - output.dim() + 1, 0, f.shape[1])
        p = f.detach().softmax(axis)
        mean = (p * u).sum(axis - output.dim(), keepdim=True)
        return self._padded((u - mean).mul_(p * self._scale(f, t, axis)), output)

    def _torch(self, output: Tensor, target: Tensor, reduction: str) -> Tensor:
        f, t, axis = self._counted(output, target)
        self._check_values(f, t, axis)
        weights = self.class_weights
        return F.cross_entropy(
            f.movedim(axis, 1),
            t.to(f.dtype).movedim(axis, 1) if t.is_floating_point() else t,
            weight=None if weights is None else weights.to(f),
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            reduction=reduction,
        )

    def _likelihood(self) -> Categorical:
        return Categorical(class_axis=self.class_axis, ignore_index=self.ignore_index)

    def _scale(self, f: Tensor, t: Tensor, axis: int) -> Tensor:
        """``|t_s|₁``: ``[n, …]`` with an axis of length 1 for the classes, freshly allocated."""
        smooth, weights = self.label_smoothing, self.class_weights
        w = None if weights is None else weights.detach().to(f)
        if t.is_floating_point():
            self._check_values(f, t, axis)
            q = t.detach().to(f.dtype) * (1 - smooth) + smooth / f.shape[axis]
            if w is not None:
                q = q * w.reshape(-1, *[1] * (f.dim() - axis - 1))
            return q.sum(axis, keepdim=True)
        if w is None:
            return (t != self.ignore_index).to(f.dtype).unsqueeze(axis)
        self._check_values(f, t, axis)
        mixed = (1 - smooth) * self._weights_at(f, t) + smooth * w.mean()
        return mixed.masked_fill_(t == self.ignore_index, 0).unsqueeze(axis)

    def _weights_at(self, f: Tensor, t: Tensor) -> Tensor:
        """The class weights of the indices ``t``, 0 where they do not count; shaped as t."""
        assert self.class_weights is not None
        ignored = t == self.ignore_index
        return self.class_weights.detach().to(f)[t.masked_fill(ignored, 0)].masked_fill(ignored, 0)

    def _counted(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor, int]:
        """Logits, targets of the positions that have any, and the axis of the classes."""
        f = precise(output)
        axis = self._axis(output)
        classes = f.shape[axis]
        if self.class_weights is not None and self.class_weights.numel() != classes:
            raise SettingError(
                f"CrossEntropy.class_weights has {self.class_weights.numel()} weights, but the "
                f"output of shape {list(f.shape)} has {classes} classes on axis {axis}: pass one "
                "weight a class, or set class_axis."
            )
        expected = [*f.shape[:axis], *f.shape[axis + 1 :]]
        wanted = (
            f"pass class indices of shape {expected}, or class probabilities of the output's "
            f"shape {list(f.shape)}."
        )
        if target.is_complex() or target.dtype == torch.bool:
            raise SettingError(f"CrossEntropy got {target.dtype} targets: {wanted}")
        shape = list(f.shape) if target.is_floating_point() else expected
        if list(target.shape) != shape:
            raise SettingError(
                f"CrossEntropy got {target.dtype} targets of shape {list(target.shape)} for an "
                f"output with its classes on axis {axis}: {wanted}"
            )
        if target.is_floating_point() and self.ignore_index >= 0:
            raise SettingError(
                f"CrossEntropy.ignore_index is {self.ignore_index}, but class probabilities have "
                "no index to ignore: pass class indices, or leave out ignore_index."
            )
        t = target.to(f.device)
        t = t if t.is_floating_point() else t.long()
        return self._kept(f), t[:, self.ahead :] if self.ahead else t, axis

    def _axis(self, output: Tensor) -> int:
        if output.dim() < 2:
            raise SettingError(
                "CrossEntropy needs an output [n, C, ...] or [n, ..., C] of n samples, but got the "
                f"shape {list(output.shape)}: add the axis of the samples, output.unsqueeze(0)."
            )
        axis = self.class_axis + (output.dim() if self.class_axis < 0 else 0)
        if not 1 <= axis < output.dim():
            raise SettingError(
                f"CrossEntropy.class_axis is {self.class_axis}, but an output of shape "
                f"{list(output.shape)} has its classes on an axis from 1 to {output.dim() - 1}: "
                "pass that axis."
            )
        if self.ahead and axis == 1:
            raise SettingError(
                f"CrossEntropy.ahead is {self.ahead}, which needs an output [n, T, ..., C] with "
                f"positions on axis 1, but got the shape {list(output.shape)}: leave out ahead."
            )
        return axis

    def _kept(self, f: Tensor) -> Tensor:
        """Without the last ``ahead`` positions."""
        return f[:, : -self.ahead] if self.ahead else f

    def _padded(self, v: Tensor, output: Tensor) -> Tensor:
        """``v [..., n, T - ahead, …]`` with zeros at the positions that predict nothing."""
        if not self.ahead:
            return v
        axis = v.dim() - output.dim() + 1
        shape = list(v.shape)
        shape[axis] = output.shape[1] - shape[axis]
        return torch.cat([v, v.new_zeros(shape)], axis)

    def _check_values(self, f: Tensor, t: Tensor, axis: int) -> None:
        if t.is_floating_point():
            if not holds(t >= 0):
                raise SettingError(
                    f"CrossEntropy got the class probability {float(t[~(t >= 0)][0])}, but none "
                    "may be below 0: pass probabilities, not logits or their logarithms."
                )
            return
        classes = f.shape[axis]
        good = ((t >= 0) & (t < classes)) | (t == self.ignore_index)
        if not holds(good):
            raise SettingError(
                f"CrossEntropy got the class index {int(t[~good][0])}, but the output has "
                f"{classes} classes on axis {axis}: pass indices from 0 to {classes - 1}, or "
                f"{self.ignore_index} where a target does not count."
            )
