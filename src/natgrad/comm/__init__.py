"""Everything that knows of other processes."""

import torch.distributed as dist

from natgrad.comm.alone import Alone
from natgrad.comm.base import CommunicationError, Communicator, Pending, Traffic
from natgrad.comm.mpi import MPI
from natgrad.comm.process_groups import ProcessGroups, connect

__all__ = [
    "MPI",
    "Alone",
    "CommunicationError",
    "Communicator",
    "Pending",
    "ProcessGroups",
    "Traffic",
    "connect",
    "world_size",
]


def world_size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
