"""Messages over Horovod, for programs that ``horovodrun`` starts and ``hvd.init()`` connects.

Horovod pairs the collectives of different processes by name and starts one when all have named it.
Every one here is named by its communicator and by how many came before it there, which is the same
on all ranks as they call the same methods in the same order.

It is written for the functions of Horovod 0.28.
"""

import importlib
import pickle
from collections import Counter
from itertools import count
from typing import Any

import torch
from torch import Tensor

from natgrad.comm.alone import Alone
from natgrad.comm.base import Communicator
from natgrad.comm.transfers import Arrived, Pending, Then, Transfer
from natgrad.comm.wire import SUMMED_AS
from natgrad.errors import SettingError

# What moves without being added up does so as integers: Horovod knows no bfloat16.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Horovod(Communicator):
    """The processes that Horovod connects, or some of them. Call ``hvd.init()`` before; all of
    these processes must make this object together.

    A plain model's gradients are averaged by `KFAC` itself. Under ``hvd.DistributedOptimizer`` they
    are averaged by Horovod: call ``optimizer.synchronize()``, then ``kfac.step()``, and step
    ``with optimizer.skip_synchronize()``.

    Groups of ranks, which some placements and two-level meshes need, are Horovod's process sets:
    they can be made after ``hvd.init(process_sets="dynamic")``.

    Arguments:
        process_set: the ``horovod.torch.ProcessSet`` of the processes that train together; ``None``
            is all of them.
    """

    def __init__(self, process_set: Any = None) -> None:
        try:
            self._hvd = importlib.import_module("horovod.torch")
        except ImportError as error:
            raise SettingError(
                f"Horovod() needs horovod with its torch extension, which cannot be imported "
                f"({error}): set HOROVOD_WITH_PYTORCH=1 and pip install horovod, or use "
                "ProcessGroups()."
            ) from error
        if not self._hvd.is_initialized():
            raise SettingError(
                "Horovod() was made before Horovod knows of other processes: call hvd.init() first."
            )
        self._set = self._hvd.global_process_set if process_set is None else process_set
        if not isinstance(self._set, self._hvd.ProcessSet) or not self._set.included():
            raise SettingError(
                f"process_set is {process_set!r} but must be a Horovod process set that this "
                "process belongs to, or None: pass what hvd.add_process_set() returned."
            )
        super().__init__(self._set.rank(), self._set.size())
        self._index, self._numbers = _MADE[self._set.process_set_id], count()
        _MADE[self._set.process_set_id] += 1

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self._set.ranks)

    def _name(self) -> str:
        """Of the next collective; others on the same processes have names of their own."""
        return f"natgrad.{self._set.process_set_id}.{self._index}.{next(self._numbers)}"

    def _started(self, start: Any, numbers: Tensor, **options: Any) -> int:
        handle: int = start(numbers, name=self._name(), process_set=self._set, **options)
        return handle

    def _exchange(
        self, send: Tensor, sizes: list[int], receive: list[int], failure: str
    ) -> Pending:
        bits, each = _bits(send)
        splits = torch.tensor([each * n for n in sizes], dtype=torch.int32)
        handle = self._started(self._hvd.alltoall_async, bits, splits=splits)
        transfer = HorovodTransfer(self._hvd, handle, bits.dtype, failure, bits, splits)
        return Then(transfer, lambda got: got.view(send.dtype), sends=False)

    def _total(self, own: Tensor, dtype: torch.dtype, failure: str) -> Pending:
        if not own.numel():
            return Arrived(own.to(dtype))
        handle = self._started(self._hvd.allreduce_async_, own, op=self._hvd.Sum)
        return HorovodTransfer(self._hvd, handle, dtype, failure, own)

    def _reduce_scatter(self, send: Tensor, failure: str) -> Pending:
        if not send.numel() or SUMMED_AS[send.dtype] != send.dtype:  # 16 bits would be lost
            return super()._reduce_scatter(send, failure)
        handle = self._started(self._hvd.reducescatter_async, send, op=self._hvd.Sum)
        return HorovodTransfer(self._hvd, handle, send.dtype, failure, send)

    def _all_gather(self, send: Tensor, failure: str) -> Pending:
        if not send.numel():
            return Arrived(send.clone())
        bits, _ = _bits(send)
        handle = self._started(self._hvd.allgather_async, bits)
        transfer = HorovodTransfer(self._hvd, handle, bits.dtype, failure, bits)
        return Then(transfer, lambda got: got.view(send.dtype), sends=False)

    def _split(self, ranks: list[int]) -> Communicator:
        """All processes make all process sets, in one order."""
        parts = sorted({tuple(part) for part in self._gather(ranks)})
        mine = tuple(self.ranks[rank] for rank in ranks)
        if len(parts) == 1:
            return Horovod(self._set)
        if self._set is not self._hvd.global_process_set:
            raise SettingError(
                f"Ranks {list(mine)} are to be a group within a group of Horovod's, which only all "
                "processes together can make: pass Horovod() of all processes."
            )
        made = {part: self._process_set(part) for part in parts if len(part) > 1}
        return Horovod(made[tuple(ranks)]) if len(ranks) > 1 else Alone()

    def _process_set(self, ranks: tuple[int, ...]) -> Any:
        if ranks not in _SETS:  # Horovod refuses to make one twice
            try:
                _SETS[ranks] = self._hvd.add_process_set(list(ranks))
            except (ValueError, RuntimeError, NotImplementedError) as error:
                raise SettingError(
                    f"Horovod cannot make a process set of the ranks {list(ranks)} ({error}): call "
                    'hvd.init(process_sets="dynamic").'
                ) from error
        return _SETS[ranks]

    def _gather(self, value: object) -> list[Any]:
        """Horovod's own function for objects knows no process sets."""
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        lengths = self._gathered(torch.tensor([len(own)]))
        whole = self._gathered(own).split(lengths.tolist())
        return [pickle.loads(part.numpy().tobytes()) for part in whole]

    def _gathered(self, numbers: Tensor) -> Tensor:
        handle = self._started(self._hvd.allgather_async, numbers)
        found: Tensor = self._hvd.synchronize(handle)
        return found


_SETS: dict[tuple[int, ...], Any] = {}
_MADE: Counter[int] = Counter()  # communicators of each process set


class HorovodTransfer(Transfer):
    """A collective that Horovod's own thread carries out.

    Arguments:
        hvd: the module ``horovod.torch``.
        handle: of the collective.
        dtype: as for `Transfer`.
        failure: as for `Transfer`.
        buffers: as for `Transfer`.
    """

    def __init__(
        self, hvd: Any, handle: int, dtype: torch.dtype, failure: str, *buffers: Tensor
    ) -> None:
        self._hvd, self._handle = hvd, handle
        self._done = False
        self._error: Exception | None = None
        super().__init__(buffers[0].new_empty(0), dtype, failure, *buffers)

    def _arrived(self) -> bool:
        """Horovod keeps the buffers of one that nobody asks for, so it is asked here as well."""
        if not self._done and self._hvd.poll(self._handle):
            self._ask()
        return self._done

    def _finish(self) -> None:
        if not self._done:
            self._ask()
        if self._error is not None:
            raise self._error

    def _ask(self) -> None:
        self._done = True
        try:
            found = self._hvd.synchronize(self._handle)
        except Exception as error:  # once: the handle is then forgotten
            self._error = error
        else:  # an all-to-all says as well what each rank has sent
            self._received = found[0] if isinstance(found, tuple) else found


def _bits(numbers: Tensor) -> tuple[Tensor, int]:
    """The same bits as integers, with how many of these make a number."""
    size = numbers.element_size()
    return numbers.view(BITS[min(size, 8)]), max(1, size // 8)
