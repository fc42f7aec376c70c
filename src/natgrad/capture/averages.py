"""Running averages of factors, kept apart from the sums of a step (Pauloski 2022, eq. 14-15).

    weight <- decay weight + (1 - decay)
    mean   <- mean + (1 - decay) / weight (new - mean)

An average starts empty and ``weight`` corrects for that: after the first update ``mean`` is
``new``, not ``(1 - decay) new``. One that started as the identity would be a damping that nobody
has asked for, and that fades with the steps.

The sums of a step do not enter the average before they are judged as a whole: if any number of a
block's new factors is not finite, on any rank, the update of that block is dropped and leaves no
trace. That costs one more buffer on steps that update.
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
        self.change = number.clone()  # |new mean - mean| / |mean| (Osawa 2019, eq. 19)

    def fold(self, gap: Tensor, distance: Tensor, fits: Tensor, decay: float) -> None:
        """Move by a share of ``-gap = new - mean`` if ``fits``; ``distance`` is the norm of it.

        An accelerator need not stop for this: nothing of it is read by the host.
        """
        before = self.mean.norm()
        if gap.is_cpu:  # reading a number there waits for nothing
            if fits:
                self.weight.mul_(decay).add_(1 - decay)
                share_now = (1 - decay) / float(self.weight)
                self.mean.sub_(gap, alpha=share_now)
                if (size := float(before)) > 0:
                    self.change.fill_(share_now * float(distance) / size)
            return
        weight = torch.where(fits, decay * self.weight + (1 - decay), self.weight)
        share = torch.where(fits, (1 - decay) / weight.clamp(min=1e-30), torch.zeros_like(weight))
        self.mean.addcmul_(gap.nan_to_num_(0.0, 0.0, 0.0), -share.to(gap.dtype))
        moved = share * distance / before
        self.change = torch.where(fits & (before > 0), moved, self.change).to(weight.dtype)
        self.weight = weight


# Of one block: sums of new data by factor, which may be overwritten, and what makes them means.
NewSums = dict[str, tuple[Tensor, float]]


class NewEstimate:
    """New estimates ``factor * sum`` of one block's factors, before it is known if all ranks have
    good ones: all of them are folded, or none."""

    def __init__(self, running: dict[str, RunningFactor], new_sums: NewSums) -> None:
        self.running = running
        self.gaps = {
            name: torch.sub(running[name].mean, total, alpha=factor, out=total)
            for name, (total, factor) in new_sums.items()
        }
        self.distances = {name: gap.norm() for name, gap in self.gaps.items()}
        self.finite = torch.isfinite(torch.stack(list(self.distances.values())).sum())

    def fold(self, fits: Tensor, decay: float) -> None:
        for name, gap in self.gaps.items():
            self.running[name].fold(gap, self.distances[name], fits, decay)
