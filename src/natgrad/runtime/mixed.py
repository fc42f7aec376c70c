"""Loss scaling for half precision."""

from torch.amp import GradScaler  # type: ignore[attr-defined]
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from natgrad.errors import SettingError


def unscale(scaler: GradScaler | None, optimizer: Optimizer | None) -> float:
    """Make ``.grad`` unscaled, unless the user did; returns the scale that captured gradients have."""
    if scaler is None or not scaler.is_enabled():
        return 1.0
    if optimizer is None:
        raise SettingError(
            "scaler needs the optimizer whose gradients it unscales: pass KFAC(model, optimizer, "
            "scaler=scaler)."
        )
    scale = scaler.get_scale()
    if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
        scaler.unscale_(optimizer)
    return scale
