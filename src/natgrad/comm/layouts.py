"""How parameters and their gradients lie on the ranks: whole, or as boxes of a DTensor."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from natgrad.errors import SettingError

__all__ = [
    "AVERAGING",
    "Box",
    "DeviceMesh",
    "ProcessGroup",
    "box_of",
    "check_layout",
    "first_peer",
    "gradients_are_local",
    "is_sharded",
    "last_backward",
    "local",
    "settled_gradient",
    "spread_like",
    "whole",
]

Box = tuple[tuple[int, int], ...]  # (first, end) of every dimension

# Wrappers that average the gradients of all ranks, with the model in ``.module``; integrations add
# those of other libraries.
AVERAGING: list[type[nn.Module]] = [nn.parallel.DistributedDataParallel]

if dist.is_available():
    from torch.distributed import ProcessGroup
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    from torch.distributed.tensor import DTensor, distribute_tensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def is_sharded(t: Tensor) -> bool:
    """Whether a tensor is spread over ranks; a replicated DTensor is, too."""
    return dist.is_available() and isinstance(t, DTensor)


def whole(value: Any) -> Any:
    """The full tensor of a spread one, which all of its ranks must ask for; others as they are."""
    if isinstance(value, Tensor):
        full: Tensor = value.full_tensor() if is_sharded(value) else value  # type: ignore[attr-defined]
        # One that is still on its way has no address, and so could be taken for another.
        return full.trigger_wait() if _is_on_its_way(full) else full  # type: ignore[attr-defined]
    if isinstance(value, tuple | list) and any(isinstance(v, Tensor) for v in value):
        return type(value)(whole(v) for v in value)
    return value


def _is_on_its_way(t: Tensor) -> bool:
    return dist.is_available() and isinstance(t, AsyncCollectiveTensor)


def spread_like(t: Tensor, other: Tensor) -> Tensor:
    """A full tensor that all ranks have, laid out as ``other`` of the same shape is."""
    if not is_sharded(other):
        return t
    mesh, placements = other.device_mesh, other.placements  # type: ignore[attr-defined]
    return distribute_tensor(t, mesh, placements, src_data_rank=None)


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
    if any(isinstance(m, tuple(AVERAGING)) for m in model.modules()):
        return False
    return not any(is_sharded(p) for p in model.parameters())


def last_backward(model: nn.Module) -> Callable[[], bool] | None:
    """Tells, during a backward pass, whether it is the last one before a step; ``None`` if nothing
    says so. DDP's ``no_sync`` and FSDP's ``set_requires_...`` do."""
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            return lambda ddp=module: bool(ddp.require_backward_grad_sync)  # type: ignore[misc]
    if not dist.is_available():
        return None
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        return None
    return lambda: all(g.reduce_grads and g.all_reduce_grads for g in _fsdp_groups(sharded))


def first_peer(model: nn.Module, ranks: Sequence[int], rank: int) -> int:
    """The first of those that compute one loss together: tensor parallelism cuts layers over them,
    so they see the same samples. ``ranks`` are the processes of rank 0, 1, … of a group."""
    if not dist.is_available():
        return rank
    averaged: set[int] = set()  # over these FSDP takes means, so they see different samples
    for group in _fsdp_groups(m for m in model.modules() if isinstance(m, FSDPModule)):
        averaged.update(_processes(group.mesh_info.mesh))
    peers = {ranks[rank]}
    for mesh in {p.device_mesh for p in model.parameters() if isinstance(p, DTensor)}:
        here = mesh.get_coordinate()
        assert here is not None
        own: list[int | slice] = []
        for axis, place in enumerate(here):
            along = dist.get_process_group_ranks(mesh.get_group(axis))
            own.append(place if averaged.issuperset(along) else slice(None))
        peers.update(mesh.mesh[tuple(own)].flatten().tolist())
    return ranks.index(min(peers))


def check_layout(model: nn.Module, ranks: Sequence[int]) -> None:
    """Raise if a model is spread in a way, or over processes, that are not those of K-FAC."""
    if not dist.is_available():
        return
    for name, p in model.named_parameters():
        if hasattr(p, "_st_info"):
            raise SettingError(
                f"Parameter {name!r} is a part of a layer and does not tell which, as DDP has made "
                "it, by device_mesh: use fully_shard, on a mesh of (replicas, 1) to shard nothing."
            )
        if isinstance(p, DTensor) and not set(ranks).issuperset(_processes(p.device_mesh)):
            raise SettingError(
                f"Parameter {name!r} is spread over processes {_processes(p.device_mesh)} but "
                f"KFAC's group has {sorted(ranks)}: pass a group that has all of them, or None."
            )
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            raise SettingError(
                "The model is a FullyShardedDataParallel, or has one inside, which makes one flat "
                "parameter of many layers: use torch.distributed.fsdp.fully_shard instead."
            )
        if isinstance(module, nn.parallel.DistributedDataParallel):
            averaged = sorted(dist.get_process_group_ranks(module.process_group))
            if averaged != sorted(ranks):
                raise SettingError(
                    f"DDP averages the gradients of processes {averaged} but KFAC's group has "
                    f"{sorted(ranks)}: pass group=model.process_group to KFAC."
                )


def _processes(mesh: "DeviceMesh") -> list[int]:
    found: list[int] = sorted(mesh.mesh.flatten().tolist())
    return found


def _fsdp_groups(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """The parameters that FSDP communicates at once: each knows its mesh and what it is told."""
    for module in modules:
        state = module._get_fsdp_state()  # type: ignore[operator]
        several = getattr(state, "_fsdp_param_groups", None)  # older releases have one at most
        yield from [state._fsdp_param_group] if several is None else several
