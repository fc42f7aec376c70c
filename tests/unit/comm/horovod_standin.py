"""What `natgrad.comm.Horovod` uses of ``horovod.torch`` 0.28, over torch.distributed.

As strict as the original where that can be seen from outside: it takes the dtypes that Horovod has,
pairs collectives by name and refuses two of one name, gives a result once, makes a process set only
when all processes ask for it, and none twice.
"""

import sys
import types
from itertools import count

import torch
import torch.distributed as dist

DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES += (torch.float16, torch.float32, torch.float64)


class ProcessSet:
    def __init__(self, ranks):
        self.ranks, self.process_set_id, self.group = list(ranks), None, None

    def included(self):
        return dist.get_rank() in self.ranks

    def size(self):
        return len(self.ranks)

    def rank(self):
        return self.ranks.index(dist.get_rank())


class Standin(types.ModuleType):
    """A module, as Horovod is one, made anew for every test."""

    Sum, Average = "sum", "average"
    ProcessSet = ProcessSet

    def __init__(self):
        super().__init__("horovod.torch")
        self.dynamic, self.results, self.names, self.handles = True, {}, set(), count(1)
        self.global_process_set = ProcessSet(range(dist.get_world_size()))
        self.global_process_set.process_set_id = 0
        self.sets = [self.global_process_set]

    def is_initialized(self):
        return True

    def add_process_set(self, ranks):
        if not self.dynamic:
            raise ValueError("HOROVOD_DYNAMIC_PROCESS_SETS is not set")
        asked = [None] * dist.get_world_size()
        dist.all_gather_object(asked, ranks)
        assert asked == [ranks] * len(asked), f"the processes ask for different sets: {asked}"
        if any(one.ranks == ranks for one in self.sets):
            raise ValueError(f"Attempted to add a duplicate process set: {ranks}")
        made = ProcessSet(ranks)
        made.process_set_id, made.group = len(self.sets), dist.new_group(ranks)
        self.sets.append(made)
        return made

    def _start(self, kind, tensor, name, process_set, carry):
        assert tensor.dtype in DTYPES, f"Horovod has no {kind} of {tensor.dtype}"
        assert name not in self.names, f"two collectives have the name {name}"
        self.names.add(name)
        said = [None] * process_set.size()
        dist.all_gather_object(said, (kind, name), group=process_set.group)
        assert len(set(said)) == 1, f"collectives that do not pair: {said}"
        handle = next(self.handles)
        self.results[handle] = carry(process_set.group)
        return handle

    def allreduce_async_(self, tensor, *, name, op, process_set):
        assert op == self.Sum

        def carry(group):
            dist.all_reduce(tensor, group=group)
            return tensor

        return self._start("allreduce", tensor, name, process_set, carry)

    def reducescatter_async(self, tensor, *, name, op, process_set):
        assert op == self.Sum

        def carry(group):
            total = tensor.clone()
            dist.all_reduce(total, group=group)
            return total.chunk(process_set.size())[process_set.rank()].clone()

        return self._start("reducescatter", tensor, name, process_set, carry)

    def allgather_async(self, tensor, *, name, process_set):
        def carry(group):
            pieces = [None] * process_set.size()
            dist.all_gather_object(pieces, tensor, group=group)
            return torch.cat(pieces)

        return self._start("allgather", tensor, name, process_set, carry)

    def alltoall_async(self, tensor, *, splits, name, process_set):
        assert splits.dtype == torch.int32
        assert splits.sum() == len(tensor)

        def carry(group):
            pieces = [None] * process_set.size()
            dist.all_gather_object(pieces, tensor.split(splits.tolist()), group=group)
            mine = [piece[process_set.rank()] for piece in pieces]
            return torch.cat(mine), torch.tensor([len(one) for one in mine])

        return self._start("alltoall", tensor, name, process_set, carry)

    def poll(self, handle):
        return handle in self.results

    def synchronize(self, handle):
        return self.results.pop(handle)


def install():
    """In place of Horovod; returns it."""
    made = sys.modules["horovod.torch"] = Standin()
    sys.modules["horovod"] = types.ModuleType("horovod")
    return made


def remove():
    for name in ("horovod.torch", "horovod"):
        sys.modules.pop(name, None)
