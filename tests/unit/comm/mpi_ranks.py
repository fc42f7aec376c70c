"""The contract over MPI, to be run by mpirun; rank 0 prints what it has checked."""

import sys
import traceback
import warnings
from functools import partial

import torch
from mpi4py.MPI import COMM_WORLD

from natgrad.comm import MPI
from unit.comm.contract import CONTRACT, says, start


def sub_groups():
    """Each process alone, and all of them in the opposite order."""
    rank, size = COMM_WORLD.Get_rank(), COMM_WORLD.Get_size()
    alone = MPI(COMM_WORLD.Split(color=rank))
    assert (alone.rank, alone.size) == (0, 1)
    turned = MPI(COMM_WORLD.Split(color=0, key=-rank))
    assert (turned.rank, turned.size) == (size - 1 - rank, size)
    assert turned.gather(rank) == list(reversed(range(size)))


def wrong_settings():
    says(
        "comm is 'world' but must be an mpi4py communicator or None: pass one such as "
        "mpi4py.MPI.COMM_WORLD.",
        *(MPI, "world"),
    )
    says(
        "MPI() carries tensors of the CPU, but these are on meta: use ProcessGroups(), or move "
        "them with .cpu().",
        *(MPI().total, torch.empty(2, device="meta"), "x"),
    )


def own_messages():
    """A message of the program's own, under way all the time, changes nothing."""
    rank, size = COMM_WORLD.Get_rank(), COMM_WORLD.Get_size()
    request = COMM_WORLD.isend(rank, dest=(rank + 1) % size, tag=0)
    start(MPI()).wait()
    assert COMM_WORLD.recv(source=(rank - 1) % size, tag=0) == (rank - 1) % size
    request.wait()


def main() -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    checks = {check.__name__: partial(check, MPI()) for check in CONTRACT}
    checks |= {check.__name__: check for check in (sub_groups, wrong_settings, own_messages)}
    for name, check in checks.items():
        check()
        if COMM_WORLD.Get_rank() == 0:
            print(name, flush=True)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        COMM_WORLD.Abort(1)  # the others would wait forever
