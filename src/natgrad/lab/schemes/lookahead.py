"""Lookahead: some steps forward and one back, ``φ ← φ + α (θ - φ)``, ``θ ← φ``."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from natgrad.checks import Range, check_whole, number
from natgrad.lab.schemes.wrapper import Wrapper

_COUNT = "lookahead_steps"
_SLOW = "lookahead_slow"
_SHARE = Range(low=0, high=1, open_low=True)


class Lookahead(Wrapper):
    """Takes ``every`` steps of ``optimizer``, then keeps the part ``alpha`` of the way (Zhang et
    al. 2019).

    The slow weights ``φ`` are those from which the steps set out, so that whatever else is done to
    the weights between two steps, such as rescaling, is not undone. The state of ``optimizer``, its
    momentum for one, goes on as it is.

    Arguments:
        optimizer: takes the steps forward.
        every: steps from one return to the next, at least 1.
        alpha: share of the way that is kept, above 0 and at most 1.
    """

    def __init__(self, optimizer: Optimizer, every: int = 5, alpha: float = 0.5) -> None:
        super().__init__(optimizer)
        check_whole(every, "Lookahead.every", low=1)
        self.every, self.alpha = every, number(alpha, "Lookahead.alpha", _SHARE)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "every": self.every, "alpha": self.alpha}

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        # All groups count alike; the number stands in each, as it is saved with them.
        """A step of the optimizer within, and every so often the way back. Returns what ``closure``
        did.

        Arguments:
            closure: computes the loss anew, with gradients, and returns it; ``None`` steps by the
                gradients that are there.
        """
        count = self.param_groups[0].get(_COUNT, 0)
        sets_out, turns_back = count % self.every == 0, (count + 1) % self.every == 0
        start = self.copies(lambda p: sets_out or _SLOW not in self.remembered(p))
        loss = self.inner_step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                group[_COUNT] = count + 1
                for p in group["params"]:
                    if p in start and (p.grad is not None or _SLOW in self.remembered(p)):
                        self.state[p][_SLOW] = start[p]
                    if turns_back and _SLOW in self.remembered(p):
                        slow = self.state[p][_SLOW]
                        slow.lerp_(p, self.alpha)
                        p.copy_(slow)
        return loss
