"""Everything that knows of other processes."""

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
