"""Processes that are forked from one that has imported torch, and so begin at once.

For tests that need another process (it is killed, it holds a lock, its disk is full, its output is
no terminal) but not a new interpreter. What is about the interpreter itself - the command as it is
installed, `torchrun`, what is imported when - starts that.

    ended = run(function, *args)              # ended.code, ended.out, ended.err
    with started(function, *args) as process: # as a subprocess.Popen
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)

The process has the working folder, the environment and the modules by name that this one has now.
It is forked from the server that the ranks of `World` come from, which has no threads.
"""

import gc
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from distributed import world


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


class Process:
    """As much of `subprocess.Popen` as tests ask for."""

    def __init__(self, function: Callable[..., object], args: Sequence[Any], folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(world.PRELOAD)
        module = sys.modules[function.__module__]
        where = (module.__name__, module.__file__, dict(os.environ), os.getcwd())
        job = pickle.dumps((function, list(args)))
        self.folder = folder
        self._process = context.Process(target=_life, args=(str(folder), where, job))
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    poll = returncode.fget

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """No other process can have its number: the server has not forgotten it yet."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it has said, once it has ended."""
        self.wait(timeout)
        return self.said("out"), self.said("err")

    def said(self, stream: str) -> str:
        """So far."""
        file = self.folder / stream
        return file.read_text(encoding="utf-8") if file.exists() else ""


@contextmanager
def started(function: Callable[..., object], *args: Any) -> Iterator[Process]:
    """``function(*args)`` in a process that does not live longer than the block. The function is
    found by name in its module. The exit code is that of a script whose last line calls it."""
    with TemporaryDirectory(prefix="natgrad-forked-") as folder:
        process = Process(function, args, Path(folder))
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def run(function: Callable[..., object], *args: Any, timeout: float = 120) -> Ended:
    with started(function, *args) as process:
        out, err = process.communicate(timeout)
        return Ended(process.wait(), out, err)


def ranks(
    count: int, function: Callable[..., object], *args: Any, timeout: float = 120
) -> list[Ended]:
    """As many processes with the environment that torchrun gives them, rank 0 first. When one of
    them fails, the others are killed, as torchrun does."""
    with ExitStack() as stack:
        processes, port = [], _free_port()
        for rank in range(count):
            given = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count),
                "LOCAL_WORLD_SIZE": str(count),
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RUN_ID": "of-a-test",
            }
            processes.append(stack.enter_context(started(_with, given, function, args)))
        end = time.monotonic() + timeout
        while any(one.poll() is None for one in processes) and time.monotonic() < end:
            if any(one.poll() for one in processes):
                break
            time.sleep(0.02)
        for one in processes:
            one.kill()
            one.wait()
        return [Ended(one.wait(), one.said("out"), one.said("err")) for one in processes]


def command(*arguments: object) -> None:
    """``natgrad ...``, or ``python -m natgrad ...``, in a process of `started`."""
    from natgrad.cli import run as natgrad

    sys.argv = ["natgrad", *map(str, arguments)]
    natgrad()


def module(name: str, *arguments: object) -> None:
    """``python -m name ...`` in a process of `started`."""
    import runpy

    sys.argv = [name, *map(str, arguments)]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def script(path: object, *arguments: object) -> None:
    """``python path ...`` in a process of `started`."""
    import runpy

    sys.argv = [str(path), *map(str, arguments)]
    sys.path.insert(0, str(Path(str(path)).parent))
    runpy.run_path(str(path), run_name="__main__")


def _with(given: dict[str, str], function: Callable[..., object], args: Sequence[Any]) -> None:
    os.environ.update(given)
    function(*args)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        return int(taken.getsockname()[1])


def _life(folder: str, where: tuple[str, str, dict[str, str], str], job: bytes) -> None:
    gc.freeze()  # a collection would look at all of torch, and copy it
    gc.set_threshold(*world.GARBAGE)
    for name, number in (("out", 1), ("err", 2)):
        file = os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    module, path, environment, directory = where
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    world._import(module, path)
    function, args = pickle.loads(job)
    _threads()
    function(*args)


def _threads() -> None:
    import torch

    torch.set_num_threads(1)
