"""Joins the process group that ``torchrun`` has started, and shuts it down in the right order."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from natgrad.comm.base import Communicator
from natgrad.comm.connecting import connect
from natgrad.comm.process_groups import initialised
from natgrad.errors import NatgradError


@contextmanager
def joined() -> Iterator[tuple[Communicator, torch.device]]:
    """All processes there are, and the device of this one.

    A process that was not started by torchrun is alone; a process group that is there already is
    used, and stays.
    """
    started = not initialised() and dist.is_available() and "TORCHELASTIC_RUN_ID" in os.environ
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if started:
        dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    comm = connect()
    try:
        yield comm, device
    except NatgradError as error:
        # Not after any other error: other ranks may be somewhere else.
        if started and error.everywhere:
            destroy_group()
        raise
    if started:
        destroy_group()


def destroy_group() -> None:
    """Destroy the group, after gloo has released the last collective's tensors. Its threads need
    the interpreter for that, and abort the process if it ends before."""
    dist.barrier()
    time.sleep(0.1)
    dist.destroy_process_group()
