"""Damping that adapts to the loss: a trust region in the manner of Levenberg and Marquardt.

``(F + γI)⁻¹∇L`` minimises the quadratic model within a ball whose radius falls as ``γ`` rises. If
the loss falls as the model has predicted, the ball may grow; if not, it must shrink.
"""

from dataclasses import dataclass

from natgrad.checks import NOT_NEGATIVE, POSITIVE, Range, check_numbers, check_whole


@dataclass(frozen=True)
class LevenbergMarquardt:
    """Damping as a trust region: it follows how well the quadratic model predicts the loss (Martens
    & Grosse 2015).

    Pass the loss before and after the optimizer's step, on the same batch, to `KFAC.adapt`. With
    ``rho = (after - before) / predicted change``, the damping is multiplied by ``decay ** every``
    where ``rho > 3/4`` and divided by it where ``rho < 1/4``.

    Arguments:
        start: ``> 0``, the damping at step 0.
        every: steps between two adaptations, at least 1; `KFAC.adapt` changes nothing in between.
        decay: between 0 and 1, the factor for one step: an adaptation changes the damping by
            ``decay ** every``.
        low: ``≥ 0``, below which the damping does not fall.
        high: ``> 0``, above which it does not rise.
    """

    start: float = 1e-3
    every: int = 5
    decay: float = 0.95
    low: float = 1e-8
    high: float = 1e2

    def __post_init__(self) -> None:
        check_numbers(
            self,
            start=POSITIVE,
            decay=Range(low=0, high=1, open_low=True, open_high=True),
            low=NOT_NEGATIVE,
            high=POSITIVE,
        )
        check_whole(self.every, "LevenbergMarquardt.every", low=1)

    def next(self, damping: float, ratio: float) -> float:
        """The damping after an adaptation.

        Arguments:
            damping: the one before.
            ratio: ``rho``, the actual change of the loss over the predicted one; one that is not a
                number raises the damping.
        """
        factor = self.decay**self.every
        if ratio > 0.75:
            damping *= factor
        elif not ratio >= 0.25:  # also where the loss was not finite
            damping /= factor
        return min(max(damping, self.low), self.high)
