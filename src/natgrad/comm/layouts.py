"""How parameters and their gradients are laid out on the ranks: replicated, or sharded as DTensors.

Whatever the layout (DDP, FSDP2, HSDP, tensor parallelism), what a rank has of a tensor is a box: a
range of indices for each dimension. Ranks tell each other their boxes once, the plan says which
boxes travel, and K-FAC needs no code for each kind of parallelism.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from natgrad.errors import SettingError
from natgrad.specs import Box

__all__ = [
    "AVERAGING",
    "DeviceMesh",
    "ProcessGroup",
    "box_of",
    "check_layout",
    "first_tensor_parallel_rank",
    "full_tensor",
    "gradients_are_local",
    "is_sharded",
    "last_backward",
    "local",
    "reduced_gradient",
    "reshard_like",
]

# Wrappers that average the gradients of all ranks, with the model in ``.module``; integrations add
# those of other libraries.
AVERAGING: list[type[nn.Module]] = [nn.parallel.DistributedDataParallel]

if dist.is_available():
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_TENSOR, _FSDP = "torch.distributed.tensor", "torch.distributed.fsdp"
_COLLECTIVES = "torch.distributed._functional_collectives"


def _loaded(module: str, name: str) -> Any:
    """A class, or no class if nobody has imported its module: then nothing can be an object of it,
    and to import these modules takes as long as all of natgrad."""
    return getattr(sys.modules.get(module), name, ())


def is_sharded(t: Tensor) -> bool:
    """Whether a tensor is a DTensor, also one that is replicated.

    Arguments:
        t: a parameter or gradient.
    """
    return isinstance(t, _loaded(_TENSOR, "DTensor"))


def full_tensor(value: Any) -> Any:
    """The full tensor of a DTensor, which is a collective of all its ranks (an all-gather); other
    values as they are.

    Arguments:
        value: a tensor, a tuple or list of tensors, or anything else.
    """
    if isinstance(value, Tensor):
        full: Tensor = value.full_tensor() if is_sharded(value) else value  # type: ignore[attr-defined]
        # A tensor that is still being gathered has no address, and so could be taken for another.
        return full.trigger_wait() if _is_being_gathered(full) else full  # type: ignore[attr-defined]
    if isinstance(value, tuple | list) and any(isinstance(v, Tensor) for v in value):
        return type(value)(full_tensor(v) for v in value)
    return value


def _is_being_gathered(t: Tensor) -> bool:
    return isinstance(t, _loaded(_COLLECTIVES, "AsyncCollectiveTensor"))


def reshard_like(t: Tensor, other: Tensor) -> Tensor:
    """A full tensor, resharded as another one is.

    Arguments:
        t: the full tensor, the same on all ranks, which are not asked.
        other: a tensor of the same shape; a plain one leaves ``t`` as it is.
    """
    if not is_sharded(other):
        return t
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = other.device_mesh, other.placements  # type: ignore[attr-defined]
    return distribute_tensor(t, mesh, placements, src_data_rank=None)


def local(t: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory.

    Arguments:
        t: a DTensor, or a plain tensor, which is its own part.
    """
    if not is_sharded(t):
        return t
    part: Tensor = t.to_local()  # type: ignore[attr-defined]
    return part


def box_of(t: Tensor) -> Box:
    """Where this rank's part lies in the full tensor, ``(first, end)`` of every dimension; found
    without communication.

    Arguments:
        t: a DTensor, or a plain tensor, of which every rank has all.
    """
    if not is_sharded(t):
        return tuple((0, size) for size in t.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        t.shape,
        t.device_mesh,  # type: ignore[attr-defined]
        t.placements,  # type: ignore[attr-defined]
    )
    return tuple((first, first + size) for first, size in zip(offset, shape, strict=True))


def reduced_gradient(p: nn.Parameter) -> Tensor | None:
    """A parameter's gradient, laid out as the parameter is.

    Sequence parallelism leaves partial sums: reducing them is a collective of the parameter's own
    mesh, which all its ranks reach at the same point.

    Arguments:
        p: a parameter, whose ``.grad`` is replaced where it is laid out otherwise.
    """
    grad = p.grad
    if grad is not None and is_sharded(p) and grad.placements != p.placements:  # type: ignore[attr-defined]
        p.grad = grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]
    return p.grad


def gradients_are_local(model: nn.Module) -> bool:
    """Whether nobody sums the gradients of the ranks: neither DDP nor sharded parameters.

    Arguments:
        model: as the user gave it, with its wrappers.
    """
    if any(isinstance(m, tuple(AVERAGING)) for m in model.modules()):
        return False
    return not any(is_sharded(p) for p in model.parameters())


def last_backward(model: nn.Module) -> Callable[[], bool] | None:
    """Tells, during a backward pass, whether it is the last one before a step; ``None`` if nothing
    says so. DDP's ``no_sync`` and FSDP's ``set_requires_...`` do.

    Arguments:
        model: as the user gave it, with its wrappers.
    """
    for module in model.modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            return lambda ddp=module: bool(ddp.require_backward_grad_sync)  # type: ignore[misc]
    fsdp = _loaded(_FSDP, "FSDPModule")
    sharded = [module for module in model.modules() if isinstance(module, fsdp)]
    if not sharded:
        return None
    return lambda: all(g.reduce_grads and g.all_reduce_grads for g in _fsdp_groups(sharded))


def first_tensor_parallel_rank(model: nn.Module, ranks: Sequence[int], rank: int) -> int:
    """The rank in the group of the first process that computes one loss together with this one:
    tensor parallelism shards layers over them, so they see the same samples.

    Arguments:
        model: as the user gave it, with its wrappers.
        ranks: what the launcher calls rank 0, 1, … of the group.
        rank: of this process in the group.
    """
    if not dist.is_available():
        return rank
    averaged: set[int] = set()  # over these FSDP takes means, so they see different samples
    fsdp = _loaded(_FSDP, "FSDPModule")
    for group in _fsdp_groups(m for m in model.modules() if isinstance(m, fsdp)):
        averaged.update(_processes(group.mesh_info.mesh))
    peers = {ranks[rank]}
    sharded: list[Any] = [p for p in model.parameters() if is_sharded(p)]
    for mesh in {p.device_mesh for p in sharded}:
        here = mesh.get_coordinate()
        assert here is not None
        own: list[int | slice] = []
        for axis, place in enumerate(here):
            along = dist.get_process_group_ranks(mesh.get_group(axis))
            own.append(place if averaged.issuperset(along) else slice(None))
        peers.update(mesh.mesh[tuple(own)].flatten().tolist())
    return ranks.index(min(peers))


def check_layout(model: nn.Module, ranks: Sequence[int]) -> None:
    """Raise if a model is sharded in a way that K-FAC does not know, or over other processes than
    its own.

    Arguments:
        model: as the user gave it, with its wrappers.
        ranks: what the launcher calls rank 0, 1, … of K-FAC's group.
    """
    if not dist.is_available():
        return
    for name, p in model.named_parameters():
        if hasattr(p, "_st_info"):
            raise SettingError(
                f"Parameter {name!r} is a part of a layer and does not tell which, as DDP has made "
                "it, by device_mesh: use fully_shard, on a mesh of (replicas, 1) to shard nothing."
            )
        mesh = getattr(p, "device_mesh", None)
        if mesh is not None and not set(ranks).issuperset(_processes(mesh)):
            raise SettingError(
                f"Parameter {name!r} is spread over processes {_processes(mesh)} but "
                f"KFAC's group has {sorted(ranks)}: pass a group that has all of them, or None."
            )
    for module in model.modules():
        if isinstance(module, _loaded(_FSDP, "FullyShardedDataParallel")):
            raise SettingError(
                "The model is a FullyShardedDataParallel, or has one inside, which makes one flat "
                "parameter of many layers: use torch.distributed.fsdp.fully_shard instead."
            )
        if isinstance(module, nn.parallel.DistributedDataParallel):
            averaged = sorted(dist.get_process_group_ranks(module.process_group))
            if averaged != sorted(ranks):
                raise SettingError(
                    f"DDP averages the gradients of processes {averaged} but KFAC's group has "
                    f"{sorted(ranks)}: pass Distributed(group=model.process_group) to KFAC."
                )


def _processes(mesh: "DeviceMesh") -> list[int]:
    found: list[int] = sorted(mesh.mesh.flatten().tolist())
    return found


def _fsdp_groups(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """The parameter groups that FSDP communicates at once, each with its mesh and its flags."""
    for module in modules:
        state = module._get_fsdp_state()  # type: ignore[operator]
        several = getattr(state, "_fsdp_param_groups", None)  # older releases have one at most
        yield from [state._fsdp_param_group] if several is None else several
