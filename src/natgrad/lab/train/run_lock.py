"""One run at a time in a folder: two would write over each other's checkpoints and mix their logs.

The lock is one of the operating system on a small file that names its owner. The system takes it
away from a process that dies, so a file that a killed run has left behind stops nobody. Where a
file system has no locks, the owner's process is looked for instead.
"""

import getpass
import json
import os
import socket
import sys
from contextlib import suppress
from errno import EACCES, EAGAIN
from pathlib import Path
from typing import Any

from natgrad.errors import SettingError

if sys.platform != "win32":
    import fcntl

NAME = ".running"


class RunLock:
    """Of one run; nobody has it before `take`, nor after `release`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._handle: int | None = None

    def take(self) -> None:
        """Raise `SettingError` if another run has it."""
        while not self._taken():
            pass  # the file was one that whoever had the lock has just removed

    def release(self) -> None:
        if self._handle is not None:
            with suppress(OSError):
                self.path.unlink()  # before others can have it, so that they find it gone
            os.close(self._handle)
            self._handle = None

    def _taken(self) -> bool:
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            owner = _read(handle)
            free = _lock(handle)
            if free is None:
                free = _has_ended(owner)
            if not free:
                who = f"{owner.get('user') or 'somebody'}, process {owner.get('process', '?')} on "
                raise SettingError(
                    f"The folder {self.path.parent} has a run that is not over yet (of {who}"
                    f"{owner.get('host', 'another computer')}): wait for it, or name another "
                    f"folder with --out; if it is over for certain, remove {self.path}."
                )
            if not os.path.samestat(os.fstat(handle), self.path.stat()):
                raise FileNotFoundError(self.path)
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps(_owner()).encode(), 0)
        except FileNotFoundError:
            os.close(handle)
            return False
        except BaseException:
            os.close(handle)
            raise
        self._handle = handle
        return True


def _lock(handle: int) -> bool | None:
    """Whether the system gives the lock; ``None`` where it has none to give."""
    if sys.platform == "win32":
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return False if error.errno in (EACCES, EAGAIN) else None
    return True


def _owner() -> dict[str, Any]:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = ""
    return {"user": user, "host": socket.gethostname(), "process": os.getpid()}


def _read(handle: int) -> dict[str, Any]:
    try:
        found = json.loads(os.pread(handle, 10_000, 0))
    except ValueError:  # nothing was written yet
        return {}
    return found if isinstance(found, dict) else {}


def _has_ended(owner: dict[str, Any]) -> bool:
    """Whether an owner was a process of this computer that is no longer there."""
    if not owner:
        return True
    if owner.get("host") != socket.gethostname() or not isinstance(owner.get("process"), int):
        return False
    try:
        os.kill(owner["process"], 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
