"""Runs a function on several ranks that are connected by gloo, each a process of its own.

Every call has fresh processes, forked from a server that has imported torch once per session, so a
call costs about a tenth of a second and leaves nothing behind. Processes that live longer would
save little and cannot be cleaned: DTensor caches the meshes, and with them the process groups, of
every call before.
"""

import faulthandler
import gc
import importlib.util
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import pytest

# All that tests use of torch; imported by the server, so that it costs nothing in a call.
PRELOAD = [
    "numpy",
    "pytest",
    "sklearn.datasets",  # where it is installed
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "natgrad.operators",  # nothing is loaded by natgrad itself
    "natgrad.optimizer",
]
# How ranks are started. Where natgrad is changed in memory alone (tests/mutation), they are forked.
START = os.environ.get("NATGRAD_TEST_RANKS", "forkserver")
# New objects until garbage is looked for: Python's 700 are soon there where networks are built.
GARBAGE = (20_000, 20, 20)
GRACE = 0.5  # seconds for the other ranks to say what they know, once one has failed


class RankError(Exception):
    """A rank ended, hung, or raised what cannot be pickled."""


class RankTraceback(Exception):  # noqa: N818 - it is only ever the cause of an error
    """Where a rank raised what its cause is shown for."""

    def __str__(self) -> str:
        return "\n" + "\n".join(self.args)


class RankSkip(Exception):  # noqa: N818 - it is no error
    """A rank called pytest.skip(), whose own exception cannot be pickled."""


class World:
    """``world.run(function, *args, ranks=3)``; ``filters`` are those of pytest for warnings."""

    def __init__(self, filters: Sequence[str] = ("error",)) -> None:
        self.filters = list(filters)
        self.processes: list[Any] = []
        self._context = multiprocessing.get_context(START)
        self._context.set_forkserver_preload(PRELOAD)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: int,
        timeout: float = 120,
        lost: Sequence[int] = (),
    ) -> list[Any]:
        """What ``function(*args)`` returns on rank 0, 1, …, or raises what a rank raised.

        ``function`` is found by name in the module it is defined in. Ranks in ``lost`` are meant to
        die, and return None. After ``timeout`` seconds, all ranks are killed.
        """
        return self._run(function, args, function, ranks, timeout, lost)

    def each(
        self,
        function: Callable[..., Any],
        calls: Mapping[Any, Sequence[Any]],
        *,
        ranks: int,
        timeout: float = 120,
    ) -> dict[Any, list[Any]]:
        """What ``function(*calls[name])`` returns on rank 0, 1, …, for each name of ``calls``.

        All of them on the same ranks, one after the other: starting processes and the first use of
        much of torch takes longer than most of what is tested in them. What a call raises has a
        note with its name.
        """
        found = self._run(_each, (function, dict(calls)), function, ranks, timeout, ())
        return {name: [answers[name] for answers in found] for name in calls}

    def _run(
        self,
        target: Callable[..., Any],
        args: Sequence[Any],
        function: Callable[..., Any],
        ranks: int,
        timeout: float,
        lost: Sequence[int],
    ) -> list[Any]:
        module = sys.modules[function.__module__]
        job = pickle.dumps((target, args))
        with TemporaryDirectory(prefix="natgrad-world-") as folder:
            self.processes, ours = [], []
            try:
                for rank in range(ranks):
                    # One by one: a forked rank must not hold their end of another's pipe.
                    mine, theirs = self._context.Pipe()
                    ours.append(mine)
                    process = self._context.Process(
                        target=_rank,
                        args=(theirs, rank, ranks, folder, timeout, self.filters),
                        name=f"rank {rank} of {ranks}",
                    )
                    self.processes.append(process)
                    process.start()
                    theirs.close()  # so that reading ours ends when the process does
                    mine.send((module.__name__, module.__file__, job))
                call = _Call(function.__name__, self.processes, ours, set(lost))
                call.collect(time.monotonic() + timeout)
                late = call.unanswered - set(lost)
                if late and not call.failed:
                    raise RankError(
                        f"Ranks {sorted(late)} did not finish {function.__name__} within "
                        f"{timeout:g} s.\n{call.stacks(late, Path(folder))}"
                    )
                return call.results()
            finally:
                self.close()
                for mine in ours:
                    mine.close()

    def close(self) -> None:
        """End what is still running."""
        started = [process for process in self.processes if process.pid is not None]
        for process in started:
            process.kill()
        for process in started:
            process.join()
        self.processes = []


class _Call:
    """What the ranks have answered so far."""

    def __init__(
        self, name: str, processes: list[Any], pipes: list[Connection], lost: set[int]
    ) -> None:
        self.name = name
        self.processes = processes
        self.pipes = pipes
        self.lost = lost
        self.answers: dict[int, Any] = {}
        self.failed: dict[int, tuple[BaseException, str]] = {}

    @property
    def unanswered(self) -> set[int]:
        return set(range(len(self.pipes))) - self.answers.keys() - self.failed.keys()

    def collect(self, deadline: float) -> None:
        """Read answers until all have come, or it is late, or a rank has failed."""
        while self.unanswered - self.lost and (seconds := deadline - time.monotonic()) > 0:
            waiting = {self.pipes[rank]: rank for rank in self.unanswered}
            for pipe in wait(list(waiting), seconds):
                self._read(waiting[pipe])
            if self.failed:
                deadline = min(deadline, time.monotonic() + GRACE)

    def _read(self, rank: int) -> None:
        try:
            good, answer = pickle.loads(self.pipes[rank].recv_bytes())
        except EOFError:
            self.processes[rank].join()
            code = self.processes[rank].exitcode
            error = RankError(f"Rank {rank} ended with code {code} in {self.name}.")
            good, answer = (True, None) if rank in self.lost else (False, (error, ""))
        if good:
            self.answers[rank] = answer
        else:
            self.failed[rank] = answer

    def results(self) -> list[Any]:
        if not self.failed:
            return [self.answers.get(rank) for rank in range(len(self.pipes))]
        # The first one to fail comes first; the others often only miss it.
        error, _ = next(iter(self.failed.values()))
        if isinstance(error, RankSkip):
            pytest.skip(str(error))
        where = (f"Rank {rank}:\n{text}" for rank, (_, text) in self.failed.items() if text)
        raise error from RankTraceback(*where)

    def stacks(self, ranks: set[int], folder: Path) -> str:
        """Where each of ``ranks`` is now."""
        for rank in ranks:
            os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(GRACE)
        files = {rank: folder / f"stack{rank}" for rank in sorted(ranks)}
        return "\n".join(
            f"Rank {rank}:\n{file.read_text() if file.exists() else 'did not even start'}"
            for rank, file in files.items()
        )


def _rank(
    pipe: Connection, rank: int, ranks: int, folder: str, timeout: float, filters: list[str]
) -> None:
    """The life of one process: connect, call, answer, and wait to be killed."""
    gc.freeze()  # a collection would look at all of torch, and copy it
    gc.set_threshold(*GARBAGE)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    with open(Path(folder) / f"stack{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, stack)
        try:
            answer = True, _called(pipe, rank, ranks, folder, timeout, filters)
        except BaseException as error:  # also what pytest.skip() and exit() raise
            answer = False, (_picklable(error), traceback.format_exc())
        try:
            pipe.send_bytes(pickle.dumps(answer))
        except Exception as error:
            problem = RankError(f"Rank {rank} cannot pickle what it returns: {error}")
            pipe.send_bytes(pickle.dumps((False, (problem, traceback.format_exc()))))
        sys.stdout.flush()
        sys.stderr.flush()
        # The other ranks may be inside of a collective, and would only see a broken connection.
        threading.Event().wait()


def _called(
    pipe: Connection, rank: int, ranks: int, folder: str, timeout: float, filters: list[str]
) -> Any:
    import torch
    import torch.distributed as dist
    from _pytest.config import apply_warning_filters

    with warnings.catch_warnings():
        apply_warning_filters(filters, [])
        name, file, job = pipe.recv()
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(Path(folder) / "store"), ranks),
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=timeout),
        )
        _import(name, file)
        function, args = pickle.loads(job)
        _seed()
        return function(*args)


def _seed() -> None:
    import numpy
    import torch

    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(0)


def _each(function: Callable[..., Any], calls: dict[Any, Sequence[Any]]) -> dict[Any, Any]:
    found = {}
    for name, args in calls.items():
        _seed()
        try:
            found[name] = function(*args)
        except Exception as error:
            error.add_note(f"in the call named {name!r}")
            raise
    return found


def _import(name: str, file: str) -> None:
    """Import by file, with stand-ins for packages: only pytest finds modules by its names."""
    if name in sys.modules:
        return
    parents = name.split(".")[:-1]
    for package in (".".join(parents[: i + 1]) for i in range(len(parents))):
        try:
            importlib.import_module(package)
        except ModuleNotFoundError:
            sys.modules[package] = ModuleType(package)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def _picklable(error: BaseException) -> BaseException:
    if isinstance(error, pytest.skip.Exception):
        return RankSkip(str(error))
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RankError(f"{type(error).__name__}: {error}")


def _end_with_the_parent() -> None:
    """When pytest itself is killed, nobody kills the ranks."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
