"""What `KFAC` can be attached to, and which steps of an optimizer are none."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from natgrad.capture.hooks import Capture
from natgrad.comm.layouts import local
from natgrad.errors import SettingError
from natgrad.kfac.apply import Preconditioning
from natgrad.lengths import Length


def check(optimizers: Sequence[Any], preconditioning: Preconditioning) -> None:
    """Raise for optimizers that KFAC cannot be attached to."""
    if not optimizers:
        raise SettingError(
            "attach() hangs KFAC on the optimizer's step, but there is no optimizer: pass "
            "KFAC(model, optimizer)."
        )
    for optimizer in optimizers:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise SettingError(
                "LBFGS measures curvature by differences of gradients, which those of K-FAC are "
                "not: attach K-FAC to SGD, Adam or another first-order optimizer."
            )
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            raise SettingError(
                f"{type(optimizer).__name__} has no hooks of torch.optim.Optimizer that KFAC could "
                "hang on: call kfac.step() before its step() instead of attach()."
            )
    _check_length(preconditioning, optimizers)


def _check_length(preconditioning: Preconditioning, optimizers: Sequence[Optimizer]) -> None:
    """Whether weights can be moved after the step of what KFAC is attached to."""
    length = preconditioning.motion.length
    if length is None or not length.of_update:
        return
    if len(optimizers) > 1:
        names = " and ".join(type(o).__name__ for o in optimizers)
        raise SettingError(
            f"length={length!r} adds to the update of one optimizer, and there are {names}: make a "
            "KFAC(model, optimizer, include=[...]) for the layers of each."
        )
    if preconditioning.gradients.are_local:
        raise SettingError(
            f"length={length!r} leaves the optimizer its gradients, and those of a plain model on "
            "several ranks are averaged by K-FAC alone: use DistributedDataParallel or fully_shard."
        )
    blocks = preconditioning.team.blocks.values()
    for dtype in {p.dtype for block in blocks for p in block.parameters}:
        if torch.finfo(dtype).bits < 32:
            raise SettingError(
                f"length={length!r} reads the optimizer's update from the weights, which are "
                f"{dtype} and round it away: keep them in float32, with autocast for speed."
            )


def not_attached(length: Length) -> SettingError:
    """At a step of K-FAC that no optimizer's step follows."""
    return SettingError(
        f"length={length!r} moves weights after optimizer.step(), too, and KFAC only steps before "
        "it: write KFAC(model, optimizer, ...).attach(), without kfac.step()."
    )


def initialises(optimizer: Optimizer, capture: Capture) -> bool:
    """Whether a step is none: torch.distributed.checkpoint steps an optimizer that has no state
    yet on gradients of 0 at a learning rate of 0, to see what state it has."""
    if optimizer.state or capture.passes:
        return False
    if any(float(group.get("lr", 1.0)) != 0 for group in optimizer.param_groups):
        return False
    having = (p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None)
    return not any(bool(local(gradient).any()) for gradient in having)
