"""One process at a time: a lock that the system takes away from those that die."""

import os
import sys
from contextlib import suppress
from pathlib import Path

if sys.platform != "win32":
    import fcntl


class Lock:
    """``with Lock(path)``: made when no other process has the same, which is waited for.

    ``path`` is a file of the lock's own, gone when it is let go. Where the system has no such locks
    nobody waits.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        while not self._taken():
            os.close(self._handle)  # of a file that whoever had the lock has removed

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):
            self.path.unlink()  # before others can have it, so that they find it gone
        os.close(self._handle)

    def _taken(self) -> bool:
        self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT)
        try:
            if sys.platform != "win32":
                fcntl.flock(self._handle, fcntl.LOCK_EX)
        except OSError:  # a file system that knows no locks
            return True
        except BaseException:
            os.close(self._handle)
            raise
        try:
            return os.path.samestat(os.fstat(self._handle), self.path.stat())
        except FileNotFoundError:
            return False
