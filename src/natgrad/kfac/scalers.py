"""A GradScaler of a training loop, which K-FAC was not told of, or which keeps it from stepping."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from natgrad.capture.wrappers import calling_scaler, unscale
from natgrad.errors import SettingError
from natgrad.kfac.ranks.gradients import Gradients


@contextmanager
def found_scaler(kfac: Any) -> Iterator[None]:
    """A step inside ``scaler.step(optimizer)``, of a trainer's own scaler of which nobody tells; it
    is K-FAC's from now on."""
    scaler = calling_scaler() if kfac.scaler is None else None
    if scaler is None:
        yield
        return
    if kfac.reducer.overlaps:
        raise SettingError(
            "A GradScaler scales the loss, and statistics have left this rank with its scale: pass "
            "it as scaler=."
        )
    if kfac.curvature.observes:  # what was sent back until now was not scaled
        kfac.finding.loss_scale = unscale(scaler, kfac.rates.optimizers)
        try:
            yield
        finally:
            kfac.finding.loss_scale = 1.0
        kfac.use_scaler(scaler)
    else:
        kfac.use_scaler(scaler)
        yield


def check_scaled_ranks(gradients: Gradients) -> None:
    """A GradScaler that keeps one rank from stepping has the others wait for it."""
    if gradients.are_local:
        raise SettingError(
            "Ranks of a plain model average their gradients in K-FAC's step, but a GradScaler "
            "leaves it out on a rank that overflows: use DistributedDataParallel, or kfac.step() "
            "instead of attach()."
        )


def overflowed(optimizer: Optimizer) -> bool:
    """A GradScaler lets fused optimizers step, and see for themselves that they must not."""
    found: Tensor | None = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found)
