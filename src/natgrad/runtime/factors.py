"""Running averages of factors (P6): empty at first, corrected so that the first estimate is right.

``weight <- decay weight + (1 - decay)``, ``mean <- mean + (1 - decay) / weight (new - mean)``.
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

    def fold(self, lag: Tensor, distance: Tensor, fits: Tensor, decay: float) -> None:
        """Move by a share of ``-lag = new - mean`` if ``fits``; ``distance`` is the norm of it.

        An accelerator need not stop for this: nothing of it is read by the host.
        """
        before = self.mean.norm()
        if lag.is_cpu:  # reading a number there waits for nothing
            if fits:
                self.weight.mul_(decay).add_(1 - decay)
                share_now = (1 - decay) / float(self.weight)
                self.mean.sub_(lag, alpha=share_now)
                if (size := float(before)) > 0:
                    self.change.fill_(share_now * float(distance) / size)
            return
        weight = torch.where(fits, decay * self.weight + (1 - decay), self.weight)
        share = torch.where(fits, (1 - decay) / weight.clamp(min=1e-30), torch.zeros_like(weight))
        self.mean.addcmul_(lag.nan_to_num_(0.0, 0.0, 0.0), -share.to(lag.dtype))
        moved = share * distance / before
        self.change = torch.where(fits & (before > 0), moved, self.change).to(weight.dtype)
        self.weight = weight


# Of one block: sums of new data by factor, which may be overwritten, and what makes them means.
News = dict[str, tuple[Tensor, float]]


class Estimate:
    """New estimates ``factor * sum`` of one block's factors, before it is known if all ranks have
    good ones: all of them are folded, or none."""

    def __init__(self, running: dict[str, RunningFactor], news: News) -> None:
        self.running = running
        self.lags = {
            name: torch.sub(running[name].mean, total, alpha=factor, out=total)
            for name, (total, factor) in news.items()
        }
        self.distances = {name: lag.norm() for name, lag in self.lags.items()}
        self.finite = torch.isfinite(torch.stack(list(self.distances.values())).sum())

    def fold(self, fits: Tensor, decay: float) -> None:
        for name, lag in self.lags.items():
            self.running[name].fold(lag, self.distances[name], fits, decay)
