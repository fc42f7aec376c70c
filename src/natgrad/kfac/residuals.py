"""K-FAC for losses of squared residuals, and parts of a loss that K-FAC does not look at.

    L = Σ_t w_t mean_n r_tn²        F = Σ_t 2 w_t / N_t Σ_n (∂r_tn/∂W)(∂r_tn/∂W)ᵀ

Ones are sent back from each residual, ``√(2 w_t / N_t)`` for every point: as a residual depends on
its own point alone, what arrives at the uses of a weight is each point's own gradient. These are
the uses in all forward passes of the residual and in all gradients in it, and they are added up
before anything is squared. Terms of the loss are squared apart, and their blocks add up, so that
each has its own number of points, passes and weight. No assumption is in it before the structure's.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from natgrad.capture.hooks import Capture
from natgrad.capture.output_hooks import observed
from natgrad.capture.passes import Pass
from natgrad.checks import NOT_NEGATIVE, number
from natgrad.comm.layouts import full_tensor
from natgrad.curvature.fisher import Fisher
from natgrad.errors import CaptureError, SettingError
from natgrad.kfac.loss_finding import Finding, LossFinding
from natgrad.kfac.observation import Observation, Observing

_UNEVEN = (
    "What residuals() returned has weights from {:.3g} to {:.3g} in the loss of this step, but the "
    "curvature counts all calls alike: give all micro-batches equally many points and one weight."
)


class Residuals(Observing):
    """The methods of `natgrad.KFAC` for losses that differentiate the network."""

    def residuals(self, *residuals: Tensor, weights: Sequence[float] | None = None) -> Tensor:
        """The loss ``Σ_t w_t mean(r_t²)``, whose Gauss-Newton matrix becomes the curvature. Call it
        with all of its terms, once before each ``loss.backward()``, and with
        ``curvature=natgrad.curvature.GaussNewton()``.

        With micro-batches each has its own call, and the curvature is that of their weighted sum,
        ``residuals(...) / k`` of each of ``k``: all with the same weight, of equally many points.

        Costs a backward pass for each entry of a point's residual, on steps that measure curvature;
        nothing on all others.

        Arguments:
            residuals: ``[n, …]`` of ``n`` points, with their graph. Each is a term of the loss,
                with points of its own, and depends on one point of each forward pass.
            weights: of the terms; None is 1 for each.
        """
        if not self.curvature.of_residuals:
            raise SettingError(
                f"residuals() needs curvature=natgrad.curvature.GaussNewton(), but this KFAC has "
                f"{self.curvature!r}: pass it to KFAC, or leave the call out."
            )
        given = _checked(residuals, weights)
        sent: Pass | None = None
        if self.capture.armed and torch.is_grad_enabled():
            sent = send_back(self.observation, residuals, given, self._loss_scale())
        terms = (w * r.square().mean() for w, r in zip(given, residuals, strict=True))
        loss = sum(terms, start=residuals[0].new_zeros(()))
        if sent is not None and loss.requires_grad:
            loss.register_hook(partial(_weigh, sent))
        return loss

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """A context in which K-FAC looks at nothing: what is computed in it, forward passes and
        gradients, is left out of the curvature, and its gradients are preconditioned all the same.
        A forward pass before it counts wherever ``loss.backward()`` is called.

        For parts of a loss that K-FAC would refuse, such as a gradient penalty through
        convolutions."""
        before, self.capture.ignores = self.capture.ignores, True
        try:
            yield
        finally:
            self.capture.ignores = before

    def _look_at_outputs(self) -> None:
        self.capture.follows = not self.curvature.observes or self.curvature.of_residuals
        if self.curvature.observes and not self.curvature.of_residuals:
            self.capture.on_output = self.observe_prediction


def send_back(
    observation: Observation, residuals: Sequence[Tensor], weights: Sequence[float], scale: float
) -> Pass:
    """From residuals to all uses of weights behind them; ``.grad`` is not touched.

    Arguments:
        observation: whose capture has the uses, and whose statistics get what arrives.
        residuals: ``[n, …]`` each.
        weights: one for each.
        scale: that of a GradScaler.
    """
    capture = observation.capture
    for this in [this for this in capture.taped if this.returned]:
        this.tape.clear()
        del capture.taped[this]
    first: Pass | None = None
    for r, weight in zip(residuals, weights, strict=True):
        factor = scale * (weight / max(1, r.numel())) ** 0.5
        for vector in observation.curvature.vectors(full_tensor(r.detach())):
            drawn = 0.0 if first is not None else 1.0  # of each call the first one counts it
            term = _send(observation, r, (factor * vector).to(r.dtype), drawn)
            first = first or term
    assert first is not None  # no residual is empty
    return first


def _weigh(this: Pass, g: Tensor) -> None:
    """The gradient of what ``residuals()`` returned: its weight in the loss, in all backward
    passes. Nobody reads it before the step."""
    this.weight = g.detach() if this.weight is None else this.weight + g.detach()


def _send(observation: Observation, r: Tensor, vector: Tensor, drawn: float) -> Pass:
    capture = observation.capture
    tape = [(this, *entry) for this in capture.taped for entry in this.tape]
    edges = {(edge.node, edge.output_nr): edge for _, _, _, edge, _ in tape}
    found: Sequence[Tensor | None] = ()
    if edges and r.requires_grad:
        observed.add(capture.root)
        try:
            found = torch.autograd.grad(
                r, list(edges.values()), vector, retain_graph=True, allow_unused=True
            )
        finally:
            observed.discard(capture.root)
    grads = dict(zip(edges, found, strict=bool(found)))
    pairs, sizes = [], set()
    for this, use, x, edge, view in tape:
        if (g := grads.get((edge.node, edge.output_nr))) is not None:
            this.settle()
            pairs.append((use, full_tensor(x), view(g)))
            sizes.add(this.samples if this.samples is not None else len(pairs[-1][2]))
    if not pairs:
        raise CaptureError(
            "residuals() was given a residual that is not of the model's forward passes since the "
            "last backward pass: call the model that KFAC was given, and residuals() after it and "
            "before loss.backward()."
        )
    if len(sizes) > 1:
        raise CaptureError(
            f"A residual depends on forward passes with {' and '.join(map(str, sorted(sizes)))} "
            "samples, so that its points cannot be told apart: pass a residual for each of them."
        )
    term = Pass([*sizes])
    term.drawn, term.calls = drawn, Counter(use[0] for use, _, _ in pairs)
    _check_points(r, pairs, *sizes)
    capture.mark_returned(term)
    for use, x, g in pairs:
        observation.statistics.add(use, x, g, term)
    observation.statistics.flush(term)
    return term


def _check_points(r: Tensor, pairs: Sequence[tuple[Any, Any, Tensor]], samples: int) -> None:
    """Each entry of a residual must be of one sample."""
    if len(r) == samples:
        return
    touched = max(
        int(g.reshape(samples, -1).any(1).sum()) if len(g) % samples == 0 else len(g)
        for _, _, g in pairs
    )
    if len(r) > samples or touched > len(r):
        raise CaptureError(
            f"A residual of {len(r)} points depends on {samples} samples of one forward pass, so "
            "that points share samples or samples share points: pass a residual for each use of a "
            "sample, and call the model apart for samples that meet in one residual."
        )


class ResidualScale(LossFinding):
    """The scale of a loss that is known: residuals are sent back with the weights that they have
    in it, ``F = Σ_calls w F_call``. What ``w`` is shows when the loss is differentiated, and then
    the sums are there: all calls of a step must have the same."""

    doubts: tuple[str, ...] = ()

    def __call__(self, samples: int | None = None) -> Finding:
        amp = self.scaler.get_scale() if self.scaler is not None else 1.0
        passes = self.capture.passes
        samples = samples or self.capture.samples() or 0
        terms = sum(this.drawn for this in passes)
        found = [this.weight for this in passes if this.weight is not None]
        self.doubts = ()
        if found and len(found) == terms:
            weights = [w / amp for w in torch.stack(found).double().tolist()]
            if max(weights) - min(weights) > 1e-3 * max(map(abs, weights)):
                self.doubts = (_UNEVEN.format(min(weights), max(weights)),)
            if sum(weights) > 0:
                terms /= sum(weights)
        return Finding(1.0 / amp, terms, None, (0.0, 0.0, 0.0), samples)

    def settle(self, *known: Any) -> list[str]:
        return [*super().settle(*known), *self.doubts]


def finding_of(*found: Any, enabled: bool) -> LossFinding:
    """What finds the scale of the loss.

    Arguments:
        found: settings, capture, scaler and curvature.
        enabled: whether the scale matters.
    """
    curvature: Fisher = found[-1]
    capture: Capture = found[1]
    if curvature.of_residuals:
        if capture.chooser is not None:
            raise SettingError(
                "statistics= takes some samples of each forward pass, but GaussNewton() looks at "
                "residuals, which may be of several: leave it out, or show residuals() fewer."
            )
        return ResidualScale(*found, enabled=False)
    return LossFinding(*found, enabled=enabled)


def _checked(residuals: Sequence[Any], weights: Sequence[Any] | None) -> list[float]:
    if not residuals:
        raise SettingError(
            "residuals() got no residual: pass one tensor for each term of the loss."
        )
    for r in residuals:
        if not isinstance(r, Tensor) or not r.is_floating_point() or not r.ndim or not r.numel():
            what = f"a tensor of shape {list(r.shape)}" if isinstance(r, Tensor) else repr(r)
            raise SettingError(
                f"residuals() got {what} but needs floating-point tensors [points, ...] that are "
                "not empty: pass what is squared, before its mean is taken."
            )
    if weights is None:
        return [1.0] * len(residuals)
    if len(weights) != len(residuals):
        raise SettingError(
            f"residuals() got {len(weights)} weights for {len(residuals)} residuals: pass one for "
            "each."
        )
    return [number(w, "residuals(weights=...)", NOT_NEGATIVE) for w in weights]
