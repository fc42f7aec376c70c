"""Work in forked processes, which have imported torch already; those that hang are ended."""

import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

BEGINNING = 300.0  # seconds until the first test of a process, which may have to collect it


@dataclass(frozen=True)
class Ended:
    """How some tests have ended, and the one that it ended with.

    ``passed``: all of them; ``stopped``: those for which there was time; ``failed``; ``hung``:
    one of them took much longer than it should; ``died``: the process did.
    """

    how: str
    test: str = ""

    @property
    def noticed(self) -> bool:
        return self.how in ("failed", "hung", "died")


class Teller:
    """Tells the process that waits which test is next, and how it has ended."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def begins(self, test: str, limit: float) -> None:
        """Limit: the seconds after which it counts as hanging."""
        self._say({"begins": test, "limit": limit})

    def ends(self, how: str, test: str = "") -> None:
        self._say({"ends": how, "test": test})

    def _say(self, what: dict[str, object]) -> None:
        os.write(self.pipe, json.dumps(what).encode() + b"\n")


def watched(work: Callable[[Teller], None], scratch: Path, seen: bool = False) -> Ended:
    """What some work in a process of its own tells. Temporary files go into ``scratch``, which is
    removed; what it prints is only ``seen`` if that is wanted."""
    reading, writing = os.pipe()
    scratch.mkdir(parents=True, exist_ok=True)
    pid = os.fork()
    if not pid:
        os.close(reading)
        _alone(lambda: work(Teller(writing)), scratch, seen)
    os.close(writing)
    try:
        return _listened(reading)
    finally:
        os.close(reading)
        _end(pid)
        shutil.rmtree(scratch, ignore_errors=True)


def forked(work: Callable[[], int], seconds: float) -> int:
    """The exit code of some work in a process of its own. What takes longer is killed with the
    ranks that it has started."""
    pid = os.fork()
    if not pid:
        _alone(work, None, False)
    end, ended = time.monotonic() + seconds, (0, 0)
    try:
        while not ended[0] and time.monotonic() < end:
            time.sleep(0.05)
            ended = os.waitpid(pid, os.WNOHANG)
    finally:
        if not ended[0]:
            ended = (pid, _end(pid))
    return ended[1]


def cpu_seconds() -> float:
    """Of this process and of those of its own that have ended."""
    return sum(os.times()[:4])


def _alone(work: Callable[[], int | None], scratch: Path | None, seen: bool) -> None:
    """The life of the new process."""
    code = 1
    try:
        os.setsid()
        if scratch is not None:
            tempfile.tempdir = os.environ["TMPDIR"] = str(scratch)
        if not seen:
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
        code = work() or 0
    except BaseException:
        traceback.print_exc(file=sys.stderr)
    finally:
        os._exit(code)


def _end(pid: int) -> int:
    """Kill a process and those that it has started."""
    with suppress(ProcessLookupError):  # it has not become a group yet
        os.killpg(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _listened(pipe: int) -> Ended:
    test, rest, end = "", b"", time.monotonic() + BEGINNING
    while select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
        read = os.read(pipe, 1 << 16)
        if not read:
            return Ended("died", test)
        *lines, rest = (rest + read).split(b"\n")
        for told in map(json.loads, lines):
            if "ends" in told:
                return Ended(told["ends"], told["test"])
            test, end = told["begins"], time.monotonic() + told["limit"]
    return Ended("hung", test)
