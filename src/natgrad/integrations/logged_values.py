"""What a trainer's log shows of K-FAC, as numbers by name."""

from natgrad.damping import Relative
from natgrad.preconditioner import KFAC


def logged_values(kfac: KFAC) -> dict[str, float]:
    """Damping, the factor of the KL clip, and what had to be contained, since the start.

    Arguments:
        kfac: of which.
    """
    damping = kfac.settings.at(max(0, kfac.steps - 1)).damping
    return {
        "kfac/damping": damping.share if isinstance(damping, Relative) else float(damping),
        "kfac/step_scale": kfac.preconditioning.step_scale,
        "kfac/zeroed_steps": float(kfac.preconditioning.zeroed),
        "kfac/dropped_statistics": float(sum(int(block.dropped) for block in kfac.blocks)),
        "kfac/failed_decompositions": float(sum(block.failures for block in kfac.blocks)),
    }
