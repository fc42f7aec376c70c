"""The method of a preconditioner that adapts its damping: a base class of `natgrad.KFAC`."""

from typing import Any

from torch import Tensor

from natgrad.errors import SettingError
from natgrad.kfac.prediction import QuadraticModel
from natgrad.kfac.settings import KFACSettings
from natgrad.schedules import LevenbergMarquardt


class Adapting:
    """The damping of `natgrad.KFAC`, as Levenberg-Marquardt moves it."""

    steps: int
    settings: KFACSettings
    prediction: QuadraticModel
    _gathered: dict[str, Any] | None

    def adapt(self, before: Tensor | float, after: Tensor | float) -> float:
        """Adapt the damping to how much a step has lowered the loss of one batch.

        Only with ``damping=LevenbergMarquardt(...)``; does nothing between its steps. Returns the
        damping.

        Arguments:
            before: the loss of the batch before ``optimizer.step()``.
            after: the loss of the same batch after it.
        """
        rule = self.settings.damping
        if not isinstance(rule, LevenbergMarquardt):
            raise SettingError(
                f"adapt() needs a damping that adapts, but damping is {rule!r}: pass "
                "damping=natgrad.schedules.LevenbergMarquardt() to KFAC."
            )
        if self.prediction.remembered:
            now = self.settings.at(max(0, self.steps - 1))
            # A loss that still has its graph: float() would warn of that.
            first, last = (x.item() if isinstance(x, Tensor) else x for x in (before, after))
            ratio = self.prediction.ratio(first, last, now)
            self.settings.adapted = rule.next(self.settings.adapted, ratio)
            self._gathered = None  # a state that was gathered has the damping before
        return self.settings.adapted
