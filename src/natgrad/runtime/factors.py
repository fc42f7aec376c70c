"""Running averages of factors (P6): empty at first, corrected so that the first estimate is right.

``m <- m + w (new - m)`` with ``w = (1 - decay) / weight`` and ``weight <- decay weight + 1 - decay``.
"""

import torch
from torch import Tensor

from natgrad.linalg.forms import Form


class RunningFactor:
    """``mean [numel]`` in the factor's form, with everything that a resumed run needs."""

    def __init__(self, form: Form, dtype: torch.dtype, device: torch.device) -> None:
        self.form = form
        self.mean = torch.zeros(form.numel, dtype=dtype, device=device)
        number = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=device)
        self.weight = number
        self.change = number.clone()  # of the last update, |new mean - mean| / |mean| (O27)

    def fold(self, difference: Tensor, distance: Tensor, fits: Tensor, decay: float) -> None:
        """Move towards ``mean + difference`` if ``fits``; ``distance`` is the difference's norm.

        Nothing is read by the host, so an accelerator need not stop for a step.
        """
        before = self.mean.norm()
        weight = torch.where(fits, decay * self.weight + (1 - decay), self.weight)
        share = torch.where(fits, (1 - decay) / weight.clamp(min=1e-30), torch.zeros_like(weight))
        if difference.is_cpu:
            if not fits:  # reading a number of the CPU waits for nothing
                return
        else:
            difference.nan_to_num_(0.0, 0.0, 0.0)
        self.mean.addcmul_(difference, share.to(difference.dtype))
        moved = share * distance / before
        self.change = torch.where(fits & (before > 0), moved, self.change).to(weight.dtype)
        self.weight = weight


def fold_all(running: dict[str, RunningFactor], news: dict[str, Tensor], decay: float) -> Tensor:
    """Fold new estimates of one block's factors, all or none; returns whether they were finite."""
    differences = {name: new.sub_(running[name].mean) for name, new in news.items()}
    distances = {name: d.norm() for name, d in differences.items()}
    fits = torch.isfinite(torch.stack(list(distances.values())).sum())
    for name, difference in differences.items():
        running[name].fold(difference, distances[name], fits, decay)
    return fits
