"""Everything that knows of other processes; the only room that imports ``torch.distributed``.

A `Communicator` has four collectives: an exchange (all-to-all with uneven pieces), a sum
(all-reduce), and, of even slices, a reduce-scatter and an all-gather. `ProcessGroups`, `MPI`,
`Horovod` and `Alone` are its backends; another one is a class with five methods. `TwoLevels` makes
the last two inside nodes and between them. What numbers are on the way is a dtype, or `float21`,
three of them in a word of 64 bits.
"""

from natgrad.comm.alone import Alone
from natgrad.comm.base import Communicator
from natgrad.comm.connecting import connect
from natgrad.comm.horovod import Horovod
from natgrad.comm.mpi import MPI
from natgrad.comm.process_groups import ProcessGroups
from natgrad.comm.transfers import CommunicationError, Pending, Traffic
from natgrad.comm.two_levels import TwoLevels
from natgrad.comm.wire import float21

__all__ = [
    "MPI",
    "Alone",
    "CommunicationError",
    "Communicator",
    "Horovod",
    "Pending",
    "ProcessGroups",
    "Traffic",
    "TwoLevels",
    "connect",
    "float21",
]
