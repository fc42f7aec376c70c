"""How parameters and their gradients lie on the ranks: whole, or as boxes of a DTensor."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

__all__ = [
    "Box",
    "DeviceMesh",
    "ProcessGroup",
    "box_of",
    "gradients_are_local",
    "is_sharded",
    "last_backward",
    "local",
    "settled_gradient",
    "whole",
]

Box = tuple[tuple[int, int], ...]  # (first, end) of every dimension

if dist.is_available():
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def is_sharded(t: Tensor) -> bool:
    """Whether a tensor is spread over ranks; a replicated DTensor is, too."""
    return dist.is_available() and isinstance(t, DTensor)


def whole(value: Any) -> Any:
    """The full tensor of a spread one, which all of its ranks must ask for; others as they are."""
    if isinstance(value, Tensor):
        return value.full_tensor() if is_sharded(value) else value  # type: ignore[attr-defined]
    if isinstance(value, tuple | list) and any(isinstance(v, Tensor) for v in value):
        return type(value)(whole(v) for v in value)
    return value


def local(t: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    if not is_sharded(t):
        return t
    part: Tensor = t.to_local()  # type: ignore[attr-defined]
    return part


def box_of(t: Tensor) -> Box:
    """Where this rank's part lies in the full tensor. Sizes are known without communication."""
    if not is_sharded(t):
        return tuple((0, size) for size in t.shape)
    shape, offset = compute_local_shape_and_global_offset(
        t.shape,
        t.device_mesh,  # type: ignore[attr-defined]
        t.placements,  # type: ignore[attr-defined]
    )
    return tuple((first, first + size) for first, size in zip(offset, shape, strict=True))


def settled_gradient(p: nn.Parameter) -> Tensor | None:
    """A parameter's gradient, laid out as the parameter is.

    Sequence parallelism leaves sums that are still apart: bringing them together is a collective of
    the parameter's own mesh, which all its ranks reach at the same point.
    """
    grad = p.grad
    if grad is not None and is_sharded(p) and grad.placements != p.placements:  # type: ignore[attr-defined]
        p.grad = grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]
    return p.grad


def gradients_are_local(model: nn.Module) -> bool:
    """Whether nobody adds up the gradients of the ranks: neither DDP nor sharded parameters."""
    if any(isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules()):
        return False
    return not any(is_sharded(p) for p in model.parameters())


def last_backward(model: nn.Module) -> Callable[[], bool] | None:
    """Tells, during a backward pass, whether it is the last one before a step; ``None`` if nothing
    says so. DDP's ``no_sync`` and FSDP's ``set_requires_gradient_sync`` do."""
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            return lambda ddp=module: bool(ddp.require_backward_grad_sync)  # type: ignore[misc]
    if not dist.is_available():
        return None
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        return None

    def syncs() -> bool:
        groups = (module._get_fsdp_state()._fsdp_param_group for module in sharded)
        return all(group.reduce_grads for group in groups if group is not None)

    return syncs
