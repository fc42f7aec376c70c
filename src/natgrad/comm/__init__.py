"""Everything that knows of other processes; the only room that imports ``torch.distributed``.

A `Communicator` has two collectives: an exchange (all-to-all with uneven pieces) and a sum
(all-reduce). `ProcessGroups`, `MPI` and `Alone` are its backends; another one is a class with three
methods.
"""

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
]
