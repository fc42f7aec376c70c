"""What goes wrong on one rank is known to all, so that none waits for another in vain."""

from collections.abc import Callable
from typing import TypeVar

from natgrad.comm import Communicator
from natgrad.errors import NatgradError

T = TypeVar("T")


def together(comm: Communicator, call: Callable[[], T]) -> T:
    """What ``call`` returns on this rank; all ranks raise what the first of them that fails does,
    which is named unless it is rank 0."""
    problem: Exception | None = None
    try:
        value = call()
    except Exception as error:
        problem = error
    for rank, found in enumerate(comm.gather(problem)):
        if isinstance(found, NatgradError):
            said = type(found)(f"rank {rank}: {found}") if rank else found
            said.everywhere = True
            raise said
        if found is not None:
            raise found
    return value
