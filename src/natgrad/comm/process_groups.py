"""Collectives over torch.distributed, in a process group of their own.

Collectives of one group must come in the same order on all ranks. DDP and FSDP launch theirs from
hooks, at times that K-FAC does not know, so K-FAC has a group that nobody else uses.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from natgrad.comm.alone import Alone
from natgrad.comm.base import Communicator
from natgrad.comm.transfers import Pending, Transfer, communication_error
from natgrad.comm.wire import SUMMED_AS
from natgrad.errors import NatgradError, SettingError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

# The private groups under each default group. Communicators over the same ranks share one, as a
# group costs connections and memory (with NCCL much), and there is no safe time to destroy it.
_private: "WeakKeyDictionary[ProcessGroup, dict[object, ProcessGroup]]" = WeakKeyDictionary()


# Their names from torch 2.13 on, and before.
_REDUCE_SCATTER: Any = getattr(
    dist, "reduce_scatter_single", getattr(dist, "reduce_scatter_tensor", None)
)
_ALL_GATHER: Any = getattr(dist, "all_gather_single", getattr(dist, "all_gather_into_tensor", None))


def initialised() -> bool:
    """Whether this process knows of others through torch.distributed."""
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    """Of the default group."""
    return dist.get_world_size()


class ProcessGroups(Communicator):
    """The ranks of a process group or of a device mesh.

    They are numbered in the order of their ranks in the default group, and must make this object
    together; others need not take part. Messages go through a group of their own with the same
    backend and timeout, so they never interleave with those of DDP or FSDP.

    Arguments:
        group: a ``ProcessGroup``, a ``DeviceMesh`` of any shape, or ``None`` for the default group;
            this process must be in it.
    """

    def __init__(self, group: "ProcessGroup | DeviceMesh | None" = None) -> None:
        if not initialised():
            reason = (
                "is not initialised here: call torch.distributed.init_process_group() first"
                if dist.is_available()
                else "this build of torch lacks: install another"
            )
            raise SettingError(
                f"ProcessGroups() needs torch.distributed, which {reason}, or use Alone() for one "
                "process."
            )
        parents, ranks = _members(group)
        try:
            self._group = _private_group(parents, ranks)
        except NatgradError:
            raise
        except Exception as error:
            failure = f"Process {dist.get_rank()} could not make a group of processes {ranks}"
            raise communication_error(failure, error) from error
        self._ranks = ranks
        super().__init__(dist.get_rank(self._group), len(ranks))

    @classmethod
    def _over(cls, group: "ProcessGroup", ranks: tuple[int, ...]) -> "ProcessGroups":
        """Over a group that nobody else uses."""
        made = cls.__new__(cls)
        made._group, made._ranks = group, ranks
        Communicator.__init__(made, dist.get_rank(group), len(ranks))
        return made

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._ranks

    def _exchange(
        self, send: Tensor, sizes: list[int], receive: list[int], failure: str
    ) -> Pending:
        received = send.new_empty(sum(receive))
        width = send.element_size()
        # As bytes, as backends do not know every dtype.
        work = dist.all_to_all_single(
            received.view(torch.uint8),
            send.view(torch.uint8),
            [n * width for n in receive],
            [n * width for n in sizes],
            group=self._group,
            async_op=True,
        )
        return GroupTransfer(work, received, send.dtype, failure, send)

    def _total(self, own: Tensor, dtype: torch.dtype, failure: str) -> Pending:
        work = dist.all_reduce(own, group=self._group, async_op=True)
        return GroupTransfer(work, own, dtype, failure)

    def _reduce_scatter(self, send: Tensor, failure: str) -> Pending:
        # gloo makes an all-reduce of it, twice the bytes; and 16 bits must not be added up in 16.
        if SUMMED_AS[send.dtype] != send.dtype or self._backend_of(send) == "gloo":
            return super()._reduce_scatter(send, failure)
        own = send.new_empty(send.numel() // self.size)
        work = _REDUCE_SCATTER(own, send, group=self._group, async_op=True)
        return GroupTransfer(work, own, send.dtype, failure, send)

    def _all_gather(self, send: Tensor, failure: str) -> Pending:
        received = send.new_empty(self.size * send.numel())
        both = received.view(torch.uint8), send.view(torch.uint8)
        work = _ALL_GATHER(*both, group=self._group, async_op=True)
        return GroupTransfer(work, received, send.dtype, failure, send)

    def _split(self, ranks: list[int]) -> Communicator:
        part = tuple(self._ranks[rank] for rank in ranks)
        group = _part_of(self._group, part)
        return Alone() if group is None else ProcessGroups._over(group, part)

    def _backend_of(self, numbers: Tensor) -> str:
        return str(self._group._get_backend(numbers.device).name())

    def _gather(self, value: object) -> list[Any]:
        return _gathered(value, self._group)


class GroupTransfer(Transfer):
    """A nonblocking collective of torch.distributed.

    Arguments:
        work: its handle in torch.
        received: as for `Transfer`.
        dtype: as for `Transfer`.
        failure: as for `Transfer`.
        buffers: as for `Transfer`.
    """

    def __init__(
        self, work: Any, received: Tensor, dtype: torch.dtype, failure: str, *buffers: object
    ) -> None:
        self._work = work
        super().__init__(received, dtype, failure, *buffers)

    def _arrived(self) -> bool:
        return bool(self._work.is_completed())

    def _finish(self) -> None:
        self._work.wait()
        self._work = None  # it holds what was sent

    def when_arrived(self, call: Callable[[], None]) -> None:
        """Call it once, in the backend's thread, when the buffers are free.

        Arguments:
            call: a function without arguments.
        """
        self._work.get_future().add_done_callback(lambda _: call())


def _members(group: object) -> tuple[list["ProcessGroup"], tuple[int, ...]]:
    """Groups that together connect all members, and the members' ranks in the default group."""
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        if group.get_coordinate() is None:
            raise SettingError(f"{_outside('device mesh')}.")
        parents = group.get_all_groups()
        ranks = group.mesh.flatten().tolist()
    elif group is None or isinstance(group, dist.ProcessGroup):
        parents = [_everyone() if group is None else group]
        try:
            ranks = dist.get_process_group_ranks(parents[0])
        except KeyError:
            raise SettingError(
                "group is a process group that torch.distributed does not know, so it was "
                "destroyed: pass a new one."
            ) from None
    elif group == dist.GroupMember.NON_GROUP_MEMBER:
        raise SettingError(f"{_outside('process group')}.")
    else:
        raise SettingError(
            f"group is a {type(group).__name__} but must be a ProcessGroup, a DeviceMesh or None: "
            "pass one made by torch.distributed."
        )
    return parents, tuple(sorted(ranks))


def _everyone() -> "ProcessGroup":
    world = dist.group.WORLD
    assert world is not None
    return world


def _outside(kind: str) -> str:
    return (
        f"Process {dist.get_rank()} is not part of the {kind} it was given: pass its own one, or "
        "leave it out there"
    )


def _private_group(parents: Sequence["ProcessGroup"], ranks: tuple[int, ...]) -> "ProcessGroup":
    """A group of the same kind as ``parents`` that only this module knows."""
    backend, timeout = _backend(parents[0]), _timeout(parents[0])
    groups = _private.setdefault(_everyone(), {})
    key = (ranks, backend, timeout)
    if key not in groups:
        some = len(ranks) < dist.get_world_size()  # the others do not know, and must not be needed
        if some:
            _align_names(parents, backend)
        groups[key] = dist.new_group(list(ranks), timeout, backend, use_local_synchronization=some)
    return groups[key]


def _part_of(whole: "ProcessGroup", ranks: tuple[int, ...]) -> "ProcessGroup | None":
    """A group of some members of ``whole``, all of which call this, each with its own part."""
    backend, timeout = _backend(whole), _timeout(whole)
    groups, key = _private.setdefault(_everyone(), {}), ("part", ranks, backend, timeout)
    if len(ranks) > 1 and len(ranks) == dist.get_world_size(whole):
        return whole
    # Members of a part have made it together, so that either all of them know it or none.
    if not all(_gathered(len(ranks) == 1 or key in groups, whole)):
        _align_names([whole], backend)
        if len(ranks) > 1 and key not in groups:
            groups[key] = dist.new_group(
                list(ranks), timeout, backend, use_local_synchronization=True
            )
    return groups.get(key)


def _align_names(parents: Sequence["ProcessGroup"], backend: str) -> None:
    """Make the members agree on the name of their next group.

    A group that not all processes make is named after its ranks and the number of groups its
    process knows. Where that number differs the members would wait for each other under different
    names, until the timeout; those that know fewer groups therefore make some of their own.
    """
    known = len(dist.distributed_c10d._world.pg_names)
    most = known
    for parent in parents:  # along one dimension of a mesh after the other
        most = max(_gathered(most, parent))
    for _ in range(most - known):
        dist.new_group([dist.get_rank()], None, backend, use_local_synchronization=True)


def _gathered(value: object, group: "ProcessGroup") -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _backend(group: "ProcessGroup") -> str:
    backend = str(dist.get_backend(group))
    # Not named when the group was made, so torch chose one a device.
    return dist.get_backend_config(group) if backend == dist.Backend.UNDEFINED else backend


def _timeout(group: "ProcessGroup") -> timedelta | None:
    """How long ``group`` waits for others, or None for torch's default where it does not say."""
    for device in group._device_types:
        try:
            timeout: timedelta = group._get_backend(device).options._timeout
        except (AttributeError, RuntimeError):
            continue
        return timeout
    return None
