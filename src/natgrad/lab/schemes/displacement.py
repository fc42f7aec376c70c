"""Momentum of the weights themselves, ``wₜ₊₁ = wₜ - η 𝒢ₜ + m (wₜ - wₜ₋₁)``."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from natgrad.checks import FRACTION, number
from natgrad.errors import SettingError
from natgrad.lab.schemes.wrapper import Wrapper
from natgrad.schedules import CoupledMomentum

RATE = "displacement_momentum"
_PREVIOUS = "displacement_previous"


class DisplacementMomentum(Wrapper):
    """Adds ``m (wₜ - wₜ₋₁)`` to each step of ``optimizer``, usually SGD (Osawa 2019, eq. 17).

    What happens to the weights between two steps, such as rescaling, is part of the displacement.
    The momentum stands in every group as ``"displacement_momentum"``, where a number may also be
    given to one group alone. ``wₜ₋₁`` of a parameter whose gradient is missing stays as it was.

    Arguments:
        optimizer: takes the step itself; must have no momentum of its own.
        momentum: ``m`` from 0 up to but not 1, or a `CoupledMomentum`, ``m = (m₀ / η₀) η`` with the
            learning rate ``η`` of each group (eq. 16 there).
    """

    def __init__(self, optimizer: Optimizer, momentum: float | CoupledMomentum) -> None:
        super().__init__(optimizer)
        if not isinstance(momentum, CoupledMomentum):
            remedy = "pass such a number, or natgrad.schedules.CoupledMomentum(start, lr)"
            momentum = number(momentum, "DisplacementMomentum.momentum", FRACTION, remedy=remedy)
        self.momentum = momentum
        for index, group in enumerate(self.param_groups):
            if group.get("momentum"):
                raise SettingError(
                    f"Parameter group {index} of {type(optimizer).__name__} has a momentum of "
                    f"{group['momentum']!r} but must have none, as DisplacementMomentum adds one: "
                    "make the optimizer with momentum=0."
                )
        self._set_rates()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "momentum": self.momentum}

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """A step of the optimizer within, and the momentum. Returns what ``closure`` did.

        Arguments:
            closure: computes the loss anew, with gradients, and returns it; ``None`` steps by the
                gradients that are there.
        """
        self._set_rates()
        now = self.copies(lambda p: True)
        loss = self.inner_step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    kept = self.state[p]
                    if _PREVIOUS in kept:
                        p.add_(now[p] - kept[_PREVIOUS], alpha=group[RATE])
                    kept[_PREVIOUS] = now[p]
        return loss

    def _set_rates(self) -> None:
        coupled = isinstance(self.momentum, CoupledMomentum)
        for index, group in enumerate(self.param_groups):
            rate = group.setdefault(RATE, 0.0 if coupled else self.momentum)
            number(rate, f"'{RATE}' of parameter group {index}", FRACTION)
        if isinstance(self.momentum, CoupledMomentum):
            self.momentum.couple(self, RATE)
