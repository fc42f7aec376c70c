"""What fails on one rank fails on all of them, so that none waits in a collective for another.

An exception on one rank leaves the others in the next collective until it times out, with a message
about a connection and not about the cause. Here ranks gather their errors first, and all raise.
"""

import hashlib
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from natgrad.comm.base import Communicator
from natgrad.errors import NatgradError, SettingError

T = TypeVar("T")


class AllRanksAgree:
    """A context in which an error on one rank becomes an error on all of them, so that none waits
    in a collective for another. What ``agreed.compared`` holds at the end must be the same on all.

    Arguments:
        comm: the ranks that agree; all of them must enter and leave the context.
        what: the object that is being made, at the start of the error sentence.
    """

    def __init__(self, comm: Communicator, what: str = "KFAC") -> None:
        self.comm, self.what = comm, what
        self.compared: dict[str, str] = {}

    def __enter__(self) -> "AllRanksAgree":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self.comm.size == 1 or not isinstance(error, Exception | None):
            return
        everyone = gather_or_fail(
            self.comm, self.compared, error, SettingError, f"{self.what} could not be made on"
        )
        if error is None:
            _compare(everyone, self.what)


def raise_on_all_ranks(comm: Communicator, call: Callable[[], T]) -> T:
    """What ``call`` returns on this rank; all ranks raise what the first of them that fails does,
    which is named unless it is rank 0. For what one rank alone may then say to the user.

    Arguments:
        comm: the ranks, all of which must call this.
        call: without arguments; may fail on some ranks.
    """
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


def gather_or_fail(
    comm: Communicator, words: T, error: Exception | None, kind: type[Exception], what: str
) -> list[T]:
    """The words of all ranks. Where one rank has an error, which it raises itself, the others raise
    one as well.

    Arguments:
        comm: the ranks, all of which must call this.
        words: what this rank tells the others; small and picklable, and its repr says all of it.
        error: the one that this rank is about to raise, or ``None``.
        kind: class of the error that the others raise.
        what: the start of its sentence, which goes on with the rank that failed.
    """
    digest = hashlib.sha256(repr(words).encode()).digest()
    known = comm.gather((error is not None, digest))
    if not any(failed for failed, _ in known) and len({theirs for _, theirs in known}) == 1:
        return [words] * comm.size  # whole words of thousands of ranks would be gigabytes
    everyone: list[tuple[str | None, T]] = comm.gather(
        (None if error is None else str(error), words)
    )
    if error is None:
        for rank, (failure, _) in enumerate(everyone):
            if failure is not None:
                raise kind(f"{what} rank {rank}: {failure}")
    return [theirs for _, theirs in everyone]


def _compare(everyone: list[dict[str, str]], what: str) -> None:
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        for key in [*first, *(k for k in theirs if k not in first)]:
            one, other = first.get(key, "missing"), theirs.get(key, "missing")
            if one != other:
                raise SettingError(
                    f"Ranks 0 and {rank} differ in {key}: {one} on rank 0, {other} on rank {rank}. "
                    f"Build the same model and pass the same settings to {what} on every rank."
                )
