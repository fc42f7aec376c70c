"""From what a user means by "the processes that train together" to a communicator."""

from natgrad.comm.alone import Alone
from natgrad.comm.base import Communicator
from natgrad.comm.layouts import DeviceMesh, ProcessGroup
from natgrad.comm.process_groups import ProcessGroups, initialised, world_size
from natgrad.comm.two_levels import TwoLevels


def others_have_come(comm: Communicator) -> bool:
    """Whether this process was alone when it connected, and knows of others now."""
    return isinstance(comm, Alone) and not comm.chosen and initialised() and world_size() > 1


def connect(group: Communicator | ProcessGroup | DeviceMesh | None = None) -> Communicator:
    """The communicator that a user means.

    Arguments:
        group: a `Communicator`, which is returned as it is; a ``ProcessGroup`` or a ``DeviceMesh``,
            whose last dimension, of two, is taken for the ranks of one node (`TwoLevels`); or
            ``None`` for all processes there are, which is `Alone` if torch.distributed is not
            initialised.
    """
    if isinstance(group, Communicator):
        return group
    if group is None and not initialised():
        alone = Alone()
        alone.chosen = False
        return alone
    made = ProcessGroups(group)
    node = _node(group)
    return made if node in (1, made.size) else TwoLevels(made, node)


def _node(group: object) -> int:
    """Ranks in a node, if a mesh of two dimensions says so and has them one behind the other."""
    if not isinstance(group, DeviceMesh) or group.mesh.ndim != 2:
        return 1
    ranks = group.mesh.flatten().tolist()
    return int(group.mesh.shape[1]) if ranks == sorted(ranks) else 1
