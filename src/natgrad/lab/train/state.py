"""Checkpoints that are complete or not there at all.

Each is a folder ``step-N``: written beside the others under another name, flushed to the disk, and
renamed when all of it is there. So whatever ends a run, the last good one stays. Files are compared
with their checksums before they are read; one that is not as it was written gives way to the one
before.
"""

import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from natgrad.comm import Communicator, checksums
from natgrad.errors import CheckpointError, first_line

FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})")


class Checkpoints:
    """Those in ``folder``, which all ranks reach; the last ``keep`` stay."""

    def __init__(self, folder: Path, keep: int, comm: Communicator) -> None:
        self.folder, self.keep, self.comm = folder, keep, comm

    def steps(self) -> list[int]:
        """Of those that are complete, the first one first."""
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def last(self) -> Path | None:
        """The file of the last one that is complete, in which the weights are under "model"."""
        steps = self.steps()
        return self._path(steps[-1]) / "state.pt" if steps else None

    def save(self, step: int, state: dict[str, Any], share: Any) -> None:
        """``state`` is the same on all ranks; each has a ``share`` of its own besides, or None."""
        final = self._path(step)
        unfinished = final.with_name(f".{final.name}.unfinished")
        rank = self.comm.rank

        def prepare() -> None:
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in self.folder.glob(".*.unfinished"):  # of runs that were killed
                shutil.rmtree(path)
            unfinished.mkdir()

        def write() -> None:
            if rank == 0:
                _write(unfinished / "state.pt", {"format": FORMAT, "step": step, **state})
            if share is not None:
                _write(unfinished / f"share-{rank}.pt", share)

        def publish() -> None:
            checksums.write(unfinished, checksums.digests(sorted(unfinished.glob("*.pt"))))
            checksums.flush(unfinished)
            shutil.rmtree(final, ignore_errors=True)
            os.replace(unfinished, final)
            checksums.flush(self.folder)
            for old in self.steps()[: -self.keep]:
                shutil.rmtree(self._path(old))

        try:
            self._together(prepare if rank == 0 else None, step)
            self._together(write, step)
            self._together(publish if rank == 0 else None, step)
        except CheckpointError:
            if rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise

    def load(self) -> tuple[dict[str, Any], list[Any]] | None:
        """The state of the last one that can be read, and the shares of all ranks there were."""
        for step in reversed(self.steps()):
            try:
                state, shares = self._read(step)
            except Exception as error:  # damaged files raise anything
                reason = _reason(error)
                warnings.warn(
                    f"The checkpoint {self._path(step)} cannot be read ({reason}): the one before "
                    "it is tried.",
                    stacklevel=2,
                )
                continue
            if state["format"] != FORMAT:
                raise CheckpointError(
                    f"The checkpoint {self._path(step)} has format {state['format']} but this "
                    f"version of natgrad reads {FORMAT}: go on with the version that wrote it."
                )
            return state, shares
        if self.steps():
            raise CheckpointError(
                f"None of the checkpoints in {self.folder} can be read: copy a good one there, or "
                "begin anew in another folder."
            )
        return None

    def _read(self, step: int) -> tuple[dict[str, Any], list[Any]]:
        folder = self._path(step)
        checksums.verify(folder)
        state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
        if not isinstance(state, dict) or not {"format", "step"} <= state.keys():
            raise ValueError("it is no state of a run")
        names = sorted(folder.glob("share-*.pt"))
        return state, [torch.load(n, map_location="cpu", weights_only=True) for n in names]

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _together(self, call: Callable[[], None] | None, step: int) -> None:
        """What is raised on one rank is raised on all."""
        problem = None
        try:
            if call is not None:
                call()
        except (OSError, RuntimeError) as reason:
            problem = _reason(reason)
        problems = [one for one in self.comm.gather(problem) if one is not None]
        if problems:
            last = self.steps()
            left = f"that of step {last[-1]} is intact" if last else "there is none before it"
            error = CheckpointError(
                f"The checkpoint of step {step} could not be written to {self.folder} "
                f"({problems[0]}), and {left}: make room, or name another folder with --out."
            )
            error.everywhere = True
            raise error


def writable(folder: Path) -> None:
    """Make the folder, and see that files can be made there, before anything takes long."""
    trial = folder / ".trial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    write_text(trial, "")
    trial.unlink()


def write_text(path: Path, text: str) -> None:
    """All of it, or what was there before stays."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        raise _unwritable(path.parent, error) from error


def _unwritable(folder: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"The folder {folder} cannot be written to ({error.strerror}): name another one with --out."
    )


def _write(path: Path, value: Any) -> None:
    with path.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


def _reason(error: Exception) -> str:
    cause: BaseException | None = error
    while cause is not None:  # torch hides that of the system behind one of its own
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return first_line(error).rstrip(".")
