"""Checkpoints that all ranks write and read together, by ``torch.distributed.checkpoint``.

A new checkpoint is written beside the last one and replaces it when it is complete and on the disk,
so that there is a good one at any time. Reading reshards: the number of ranks may be another one.
Files are compared with their checksums, and all is read beside what is there before any of it is
replaced: a checkpoint that cannot be read changes nothing.
"""

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from natgrad.comm import checksums
from natgrad.comm.base import Communicator
from natgrad.comm.layouts import local
from natgrad.comm.process_groups import ProcessGroups
from natgrad.comm.transfers import communication_error
from natgrad.errors import CheckpointError, SettingError, first_line

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
    own = place.unfinished.glob(f"__{comm.rank}_*.distcp")
    found = comm.gather(checksums.digests(own))
    _on_rank_0(comm, place, partial(place.replace, found))


def read(comm: Communicator, folder: Folder, state: dict[str, Any]) -> None:
    """Load a checkpoint, resharding it to the tensors that this rank has.

    Arguments:
        comm: the ranks that read together: of a process group, or one alone.
        folder: with a complete checkpoint; the same on all ranks.
        state: nested dictionaries with a tensor or value for everything that this rank needs;
            overwritten in place.
    """
    from torch.distributed.checkpoint import state_dict_loader

    from natgrad.comm.plain_reading import PlainPlanner, PlainReader

    place, group = CheckpointFolder(folder), _group(comm)
    _on_rank_0(comm, place, place.find)
    beside = _beside(state)
    with _as_natgrad_error(comm, f"load from '{place.folder}'"):
        reader = PlainReader(place.folder)
        state_dict_loader.load(
            beside,
            storage_reader=reader,
            planner=PlainPlanner(),
            process_group=group,
            no_dist=comm.size == 1,
        )
    _take(state, beside)


def verify(comm: Communicator, folder: Folder) -> None:
    """Raise, on all ranks, if a file of a checkpoint is not as it was written. Each rank looks at
    some of them.

    Arguments:
        comm: the ranks that read together: of a process group, or one alone.
        folder: with a complete checkpoint; the same on all ranks.
    """
    place = CheckpointFolder(folder)
    _on_rank_0(comm, place, place.find)
    files = sorted(path.name for path in place.folder.iterdir())
    problem: str | None = None
    try:
        checksums.verify(place.folder, files[comm.rank :: comm.size])
        if comm.rank == 0:
            checksums.verify_names(place.folder, files)
    except (CheckpointError, OSError) as error:
        problem = str(error)
    for found in comm.gather(problem):
        if found is not None:
            raise CheckpointError(found)


def names(comm: Communicator, folder: Folder) -> set[str]:
    """Names of everything in a checkpoint, with dots between the keys of nested dictionaries.

    Arguments:
        comm: the ranks that read together: of a process group, or one alone.
        folder: with a complete checkpoint; the same on all ranks.
    """
    from natgrad.comm.plain_reading import PlainReader

    place = CheckpointFolder(folder)
    _on_rank_0(comm, place, place.find)
    try:
        return set(PlainReader(place.folder).read_metadata().state_dict_metadata)
    except Exception as error:  # damaged pickles raise anything
        raise CheckpointError(
            f"The table of contents '{place.folder / METADATA}' cannot be read "
            f"({first_line(error).rstrip('.')}): take another copy of the folder."
        ) from error


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

    def replace(self, found: Sequence[Mapping[str, list[int | str]]]) -> None:
        """Let the new checkpoint take the place of the last one, once all of it is on the disk.

        Arguments:
            found: checksums of the files of each rank.
        """
        own = checksums.digests([self.unfinished / METADATA])
        checksums.write(self.unfinished, own | {k: v for each in found for k, v in each.items()})
        checksums.flush(self.unfinished)
        shutil.rmtree(self.replaced, ignore_errors=True)
        if self.folder.exists():
            self.folder.rename(self.replaced)
        self.unfinished.rename(self.folder)
        checksums.flush(self.folder.parent)
        shutil.rmtree(self.replaced, ignore_errors=True)

    def _recover(self) -> None:
        """A process that ended between the two renames of `replace` left the folder away."""
        if not self.folder.exists() and self.replaced.exists():
            self.replaced.rename(self.folder)

    def _unknown_files(self) -> list[str]:
        if not self.folder.is_dir():
            return [self.folder.name]
        names = sorted(path.name for path in self.folder.iterdir())
        known = (METADATA, checksums.NAME)
        return [name for name in names if name not in known and not name.endswith(".distcp")]


def _beside(value: Any) -> Any:
    """The same with new tensors of the same kinds, to be read into."""
    if isinstance(value, Tensor):
        return torch.empty_like(value)
    if isinstance(value, dict):
        return {key: _beside(item) for key, item in value.items()}
    return [_beside(item) for item in value] if isinstance(value, list) else value


@torch.no_grad()
def _take(state: Any, beside: Any) -> None:
    """Overwrite what is there by what was read: tensors in place."""
    for key in state if isinstance(state, dict) else range(len(state)):
        old, new = state[key], beside[key]
        if isinstance(old, Tensor) and isinstance(new, Tensor):
            local(old).copy_(local(new))
        elif isinstance(old, dict | list) and type(old) is type(new) and len(old) == len(new):
            _take(old, new)
        else:
            state[key] = new


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
