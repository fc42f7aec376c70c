"""Checkpoints that all ranks write and read together, by ``torch.distributed.checkpoint``.

A new checkpoint is written beside the last one and replaces it when it is complete, so that there
is a good one at any time. Reading reshards: the number of ranks may be another one.
"""

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

from natgrad.comm.base import Communicator
from natgrad.comm.process_groups import ProcessGroups
from natgrad.comm.transfers import communication_error
from natgrad.errors import CheckpointError, SettingError

Folder = str | PathLike[str]
METADATA = ".metadata"  # written by torch when all else is


def write(comm: Communicator, folder: Folder, state: dict[str, Any]) -> None:
    """Save the tensors and other values in nested dictionaries. What several ranks have under one
    name is written by one of them.

    Arguments:
        comm: the ranks that write together: of a process group, or one alone.
        folder: the same on all ranks, which must all reach it. A checkpoint there is replaced when
            the new one is complete; other files there raise `CheckpointError`.
        state: this rank's part: nested dictionaries of tensors and other values.
    """
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    place, group = CheckpointFolder(folder), _group(comm)
    _on_rank_0(comm, place, place.prepare)
    with _as_natgrad_error(comm, f"save to '{place.folder}'"):
        writer = FileSystemWriter(place.unfinished)
        state_dict_saver.save(
            state, storage_writer=writer, process_group=group, no_dist=comm.size == 1
        )
    _on_rank_0(comm, place, place.replace)


def read(comm: Communicator, folder: Folder, state: dict[str, Any]) -> None:
    """Load a checkpoint, resharding it to the tensors that this rank has.

    Arguments:
        comm: the ranks that read together: of a process group, or one alone.
        folder: with a complete checkpoint; the same on all ranks.
        state: nested dictionaries with a tensor or value for everything that this rank needs;
            overwritten in place.
    """
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    place, group = CheckpointFolder(folder), _group(comm)
    _on_rank_0(comm, place, place.find)
    with _as_natgrad_error(comm, f"load from '{place.folder}'"):
        reader = FileSystemReader(place.folder)
        state_dict_loader.load(
            state, storage_reader=reader, process_group=group, no_dist=comm.size == 1
        )


def names(comm: Communicator, folder: Folder) -> set[str]:
    """Names of everything in a checkpoint, with dots between the keys of nested dictionaries.

    Arguments:
        comm: the ranks that read together: of a process group, or one alone.
        folder: with a complete checkpoint; the same on all ranks.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    place = CheckpointFolder(folder)
    _on_rank_0(comm, place, place.find)
    with _as_natgrad_error(comm, f"load from '{place.folder}'"):
        return set(FileSystemReader(place.folder).read_metadata().state_dict_metadata)


class CheckpointFolder:
    """A checkpoint's folder, and those beside it that are there only while it is replaced.

    Arguments:
        folder: of the checkpoint; need not exist yet.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = Path(os.path.abspath(folder))
        self.unfinished = self.folder.with_name(f".{self.folder.name}.unfinished")
        self.replaced = self.folder.with_name(f".{self.folder.name}.replaced")

    def find(self) -> None:
        """Raise if there is no complete checkpoint."""
        self._recover()
        if not (self.folder / METADATA).is_file():
            raise CheckpointError(
                f"There is no complete checkpoint in '{self.folder}': pass a folder that "
                "KFAC.save() or torch.distributed.checkpoint has written."
            )

    def prepare(self) -> None:
        """Make room for a new checkpoint; the last one stays."""
        self._recover()
        if self.folder.exists() and (others := self._unknown_files()):
            raise CheckpointError(
                f"'{self.folder}' has other files than those of a checkpoint ({others[0]!r}), "
                "which replacing it would delete: pass a folder of its own."
            )
        shutil.rmtree(self.unfinished, ignore_errors=True)
        self.unfinished.mkdir(parents=True)

    def replace(self) -> None:
        """Let the new checkpoint take the place of the last one."""
        shutil.rmtree(self.replaced, ignore_errors=True)
        if self.folder.exists():
            self.folder.rename(self.replaced)
        self.unfinished.rename(self.folder)
        shutil.rmtree(self.replaced, ignore_errors=True)

    def _recover(self) -> None:
        """A process that ended between the two renames of `replace` left the folder away."""
        if not self.folder.exists() and self.replaced.exists():
            self.replaced.rename(self.folder)

    def _unknown_files(self) -> list[str]:
        if not self.folder.is_dir():
            return [self.folder.name]
        names = sorted(path.name for path in self.folder.iterdir())
        return [name for name in names if name != METADATA and not name.endswith(".distcp")]


def _group(comm: Communicator) -> Any:
    inner = comm
    while hasattr(inner, "inner"):  # those that only add something to another one
        inner = inner.inner
    if isinstance(inner, ProcessGroups):
        return inner._group
    if comm.size == 1:
        return None
    raise SettingError(
        f"save() and load() need torch.distributed to reach the other ranks, which here are "
        f"connected by {type(inner).__name__}: save what state_dict() returns, on rank 0."
    )


def _on_rank_0(comm: Communicator, place: CheckpointFolder, call: Callable[[], None]) -> None:
    """On rank 0; what it raises is raised on all ranks."""
    problem: str | None = None
    if comm.rank == 0:
        try:
            call()
        except CheckpointError as error:
            problem = str(error)
        except OSError as error:
            problem = f"'{place.folder}' cannot be used ({error}): pass another folder."
    answers = comm.gather((str(place.folder), problem))
    for rank, (folder, _) in enumerate(answers):
        if folder != answers[0][0]:
            raise CheckpointError(
                f"Rank {rank} was given the folder '{folder}' and rank 0 '{answers[0][0]}': pass "
                "the same one, which all ranks can reach."
            )
    if answers[0][1] is not None:
        raise CheckpointError(answers[0][1])


@contextmanager
def _as_natgrad_error(comm: Communicator, what: str) -> Iterator[None]:
    """torch raises what happened on any rank as something that is no Exception."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            # For one process it always says that there is only one.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavail")
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        reason = str(cause).strip().partition("\n")[0].rstrip(".")
        raise CheckpointError(
            f"Rank {rank} could not {what} ({type(cause).__name__}: {reason}). What was there "
            "before still is: see that all ranks reach the folder, and that the model is the same."
        ) from error
    except RuntimeError as error:
        failure = f"Rank {comm.rank} of {comm.size} could not {what}"
        raise communication_error(failure, error) from error
