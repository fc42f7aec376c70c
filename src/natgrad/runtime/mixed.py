"""Half precision: loss scaling, and autocast."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer


@contextmanager
def no_autocast(device: torch.device) -> Iterator[None]:
    """Tensors keep their precision, also where backward() or step() is inside of autocast."""
    if not torch.is_autocast_enabled(device.type):
        yield
        return
    with torch.autocast(device.type, enabled=False):
        yield


def unscale(scaler: GradScaler | None, optimizer: Optimizer | None) -> float:
    """Make ``.grad`` unscaled, unless the user did; returns the scale of captured gradients."""
    if scaler is None or optimizer is None or not scaler.is_enabled():
        return 1.0
    scale = scaler.get_scale()
    if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
        scaler.unscale_(optimizer)
    return scale
