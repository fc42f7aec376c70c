"""How the loss adds up its terms, found from its gradient at the model's output.

With weights ``w_t`` of the terms in the loss between two steps (`natgrad.curvature.loss_weights`),
captured gradients are ``w_t g_t``, and what damping and KL clip refer to is

    F    = sum_t (w_t g_t)(w_t g_t)^T / W2,         W2 = sum_t w_t^2
    grad = sum_t w_t g_t / W1,                      W1 = sum_t w_t

For a mean over M terms ``W1 = 1`` and ``W2 = 1/M``, for a sum both are M, and micro-batches,
padding, class weights and factors before the loss need no rule of their own. Weights are like
``M = W1^2 / W2`` of the same size (Kish's effective number), and all that are the same are taken as
exactly ``1/M`` or 1 where they are that within rounding.

- Positions without a gradient may be terms all the same, whose prediction is so sure that nothing
  is left of it. So a loss is a mean if it is one over any number of terms from those with a
  gradient to all that there are.
- A mean over samples of sums over binary outputs (an autoencoder's pixels) is one over samples.
- What fits no reading is *unknown*, and is taken for a mean over samples.
- All ranks decide together, at an update. What was once known stays known.
- On other steps nothing is looked at, unless the gradient must be divided by another ``W1`` than 1.
- Where the user has said what the loss is, the first updates are checked against that.
"""

from collections.abc import Sequence
from math import log2
from typing import Literal, NamedTuple

from torch.amp import GradScaler

from natgrad.capture.hooks import Capture
from natgrad.curvature.fisher import Fisher
from natgrad.curvature.loss_weights import Seen
from natgrad.kfac.settings import FoundLoss, KFACSettings

Kind = Literal["", "mean", "other", "unknown"]
_CHECKED_UPDATES = 3
_BINARY = ("logit", "probability")
_ROUNDING = 1e-2  # of a weight that is read in 16 bits


class Weights(NamedTuple):
    """``first``: W1; ``terms``: M. ``kind`` is "" where there was too little to tell. ``each``: the
    weight of all terms, if it is one."""

    kind: Kind
    first: float = 1.0
    terms: float = 1.0
    each: float | None = None


def combined(readings: Sequence[Seen | None], amp: float = 1.0) -> Weights:
    """The weights of all terms between two steps, one reading a pass; None: a pass without one.

    Arguments:
        readings: of each pass.
        amp: what a GradScaler has multiplied all gradients by.
    """
    if any(one is None or (not one.reading and one.count == 0) for one in readings):
        return Weights("unknown")
    found = [one for one in readings if one is not None and one.positions]
    if not found or any(one is not None and one.count < 0 for one in readings):
        return Weights("")
    limit = 4 * max(one.tolerance for one in found)
    each = {one.weight / amp for one in found}
    low, high = min(each), max(each)
    if all(one.uniform for one in found) and abs(low - 1) <= limit and abs(high - 1) <= limit:
        terms = sum(one.count for one in found)
        return Weights("mean" if terms == 1 else "other", terms, terms, 1.0)
    first = sum(one.count * one.mean for one in found) / amp
    second = sum(one.count * one.square for one in found) / amp**2
    most = sum((one.positions if one.uniform else one.count) * one.mean for one in found) / amp
    if not all(one.uniform for one in found):
        limit = max(limit, 0.05)  # some rows stand for all
    if first > 1 + limit or most < 1 - limit:
        uniform = all(one.uniform for one in found) and high - low <= limit * high
        return Weights("other", first, first**2 / second, high if uniform else None)
    if high - low <= limit * high and all(one.uniform for one in found):
        count = sum(one.count for one in found)
        terms = count if abs(first - 1) <= limit else round(len(each) / sum(each))
        return Weights("mean", 1.0, terms, 1.0 / terms)
    share = (1 - first) / (most - first) if most - first > limit else 0.0
    silent = ((one.positions - one.count) * one.square for one in found if one.uniform)
    return Weights("mean", 1.0, 1.0 / (second + share * sum(silent) / amp**2))


class Finding(NamedTuple):
    """At one step: ``scale`` makes captured gradients those of one of ``terms`` terms of the loss;
    ``first`` is W1 of this rank, if its gradient must be divided by that; ``votes``: whether it has
    seen a mean, something else, or nothing that it knows."""

    scale: float
    terms: float
    first: float | None
    votes: tuple[float, ...]
    samples: int  # 0: nobody knows


class LossFinding:
    """What makes captured gradients, and the gradient itself, those of one term of the loss."""

    def __init__(
        self,
        settings: KFACSettings,
        capture: Capture,
        scaler: GradScaler | None,
        curvature: Fisher,
        *,
        enabled: bool,
    ) -> None:
        self.settings, self.capture, self.scaler = settings, capture, scaler
        self.observes, self.enabled = curvature.observes, enabled
        self.finds = enabled and settings.finds
        self.checks_left = 0 if settings.finds or not enabled else _CHECKED_UPDATES
        self.settled = False  # the last update has found what changes the step that it is part of
        self._known: tuple[list[object], Weights] | None = None
        self.loss_scale = 1.0  # of a GradScaler that scaled the loss alone, before it was found

    def prepare(self, *, updates: bool) -> bool:
        """Have the next passes read if that is needed; returns whether they must be counted."""
        sums = self.settings.reduction == "sum"
        self.capture.reads = (self.finds and (sums or updates)) or (
            updates and self.checks_left > 0
        )
        self._known = None
        return sums

    def statistics_scale(self, samples: int | None = None) -> float:
        """Of gradients that are captured until now. It is asked before the step, too: buckets leave
        from inside the backward pass.

        Arguments:
            samples: if it is not what the model was called with.
        """
        return self(samples).scale

    def __call__(self, samples: int | None = None) -> Finding:
        """All of it, of what was captured until now.

        Arguments:
            samples: if it is not what the model was called with.
        """
        amp = self.scaler.get_scale() if self.scaler is not None else 1.0
        samples = samples or self.capture.samples() or 0
        if not self.finds:
            scale = self.settings.statistics_scale(samples, observed=self.observes)
            return Finding(scale / amp, samples, None, (0.0, 0.0, 0.0), samples)
        found = self.settings.found
        weights = self.reading(samples, amp) if self.capture.reads else Weights("")  # not looked at
        votes = tuple(float(weights.kind == each) for each in ("mean", "other", "unknown"))
        first, terms = weights.first, weights.terms
        if weights.kind not in ("mean", "other"):
            # As it was, or as if it were a mean over samples.
            used = FoundLoss("mean", 1.0, 1.0, 1) if found is None else found
            _, first, terms, _ = used.of(samples)
        scale = terms / first if samples else 0.0  # the root of M / W2
        if self.observes:  # vectors are those of terms, whatever the loss
            terms, scale = sum(this.drawn for this in self.capture.passes) or samples, 1.0
        others = found is not None and found.kind == "other"
        first_if_known = first if others else None
        return Finding(scale / amp, terms * bool(samples), first_if_known, votes, samples)

    def reading(self, samples: int, amp: float) -> Weights:
        """The weights of what counts as a term: a sample where the loss is a mean over samples of
        sums over their binary outputs, which are one prediction together (an autoencoder's pixels:
        the default damping was chosen on such sums); each output or position otherwise.

        Arguments:
            samples: of this rank.
            amp: what a GradScaler has multiplied all gradients by.
        """
        found = self.weights(amp)
        if found.kind == "other" and found.each and abs(found.each * samples - 1) < _ROUNDING:
            each = (this.weights for this in self.capture.passes)
            if all(one and one.found and one.found.reading in _BINARY for one in each):
                return Weights("mean", 1.0, samples, found.each)
        return found

    def weights(self, amp: float) -> Weights:
        """Of the loss until now."""
        passes, amp = self.capture.passes, amp * self.loss_scale
        now: list[object] = [amp, *(this.weights for this in passes)]
        if self._known is None or self._known[0] != now:
            each = (this.weights for this in passes)
            seen = [None if one is None else one.found or one.seen() for one in each]
            self._known = now, combined(seen, amp)
        return self._known[1]

    def gradient_scale(self, samples: int) -> float:
        """What makes the gradient of the loss that of the mean loss of a term, before the step.

        Arguments:
            samples: that the loss is over, where it was not found.
        """
        amp = self.scaler.get_scale() if self.scaler is not None else 1.0
        weights = self.reading(samples, amp) if self.finds else Weights("")
        if weights.kind in ("mean", "other"):
            return 1.0 / weights.first
        return self.settings.gradient_scale(samples)

    def settle(self, votes: Sequence[float], samples: int, amp: float) -> list[str]:
        """All ranks have voted. Returns what the user should know, a sentence each."""
        self.settled = False
        if not (self.finds or self.checks_left) or not samples:
            return []
        if not self.finds:
            self.checks_left -= 1
            return self._contradictions(self.weights(amp), samples)
        weights = self.reading(samples, amp)
        mean, other, unknown = votes
        if mean + other and not unknown:
            if weights.kind not in ("mean", "other"):  # not on this rank
                weights = Weights("other" if other else "mean", 1.0, samples)
            self.settled = bool(other) or self.settings.unknown
            numbers = (weights.first, weights.terms, samples)
            self.settings.found = FoundLoss("other" if other else "mean", *numbers)
            self.settings.unknown = False
        elif unknown and self.settings.found is None and not self.observes:
            self.settled = not self.settings.unknown
            self.settings.unknown = True
        if weights.kind != "other" or weights.each in (None, 1.0) or self.scaler is not None:
            return []
        return [_SCALED.format(weights.first)] if log2(weights.first) in range(7, 40) else []

    def _contradictions(self, weights: Weights, samples: int) -> list[str]:
        """Of the user's word and what was seen."""
        loss = self.settings.loss
        if weights.kind not in ("mean", "other") or getattr(loss, "regions", None):
            return []
        said = samples * loss.terms_per_sample
        meant = 1.0 if loss.reduction == "sum" else 1.0 / said
        if weights.each is not None and 0.9 < weights.each / meant < 1.1:
            return []  # a sum over tokens or pixels may be one term, if its sample is
        ratio = weights.terms / said  # of the curvature that this gives, over the right one
        if not self.observes:
            own = weights.first / weights.terms  # of one term
            ratio = own**2 * weights.terms / (meant**2 * said)
        if 0.8 < ratio < 1.25:
            return []
        found = (
            f"a mean over {weights.terms:,.0f} terms"
            if weights.kind == "mean"
            else f"a sum of {weights.terms:,.0f} terms"
            if weights.each == 1
            else f"{weights.first:.3g} times a mean over {weights.terms:,.0f} terms"
        )
        how = "small" if ratio < 1 else "large"
        factor = 1 / ratio if ratio < 1 else ratio
        return [
            f"loss={loss!r} says that the loss is a {loss.reduction} over {said:,.0f} terms "
            f"({samples:,} samples), but from the gradient at the model's output it is {found}: "
            f"the curvature is {factor:,.3g} times too {how} for its damping. Leave loss out and "
            "K-FAC finds it, or correct it."
        ]


_SCALED = (
    "The loss is {:,.0f} times a mean, which looks like the factor of a GradScaler: pass "
    "KFAC(..., scaler=scaler), so that it is taken out of gradients and statistics alike."
)
