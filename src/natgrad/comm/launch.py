"""Starts ranks on this machine, connected by gloo, and calls a function on each of them."""

import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from natgrad.errors import NatgradError, SettingError


class RankError(NatgradError, RuntimeError):
    """A rank that was started here has ended, or raised what is no error of natgrad."""


@dataclass(frozen=True)
class Start:
    """What a process needs to become a rank.

    Arguments:
        rank: number of the process, from 0.
        ranks: how many there are.
        folder: with the file by which the ranks find each other.
        threads: of torch in the process.
        timeout: seconds that a collective waits for other ranks.
    """

    rank: int
    ranks: int
    folder: str
    threads: int
    timeout: float


def run(
    function: Callable[..., Any],
    *args: object,
    ranks: int,
    threads: int = 1,
    timeout: float = 600.0,
) -> list[Any]:
    """What a function returns on rank 0, 1, …, each a new process. The first error of a rank is
    raised here, as `RankError` if it is none of natgrad's.

    Arguments:
        function: called on every rank. It is pickled, as are its arguments and what it returns, so
            it must be importable by name.
        args: its arguments, the same on every rank.
        ranks: how many processes, at least 1.
        threads: of torch in each of them, at least 1.
        timeout: seconds that a collective waits for other ranks.
    """
    if ranks < 1 or threads < 1:
        raise SettingError(
            f"ranks is {ranks} and threads is {threads} but both must be at least 1: pass such "
            "numbers."
        )
    job = pickle.dumps((function, args))
    # Not forked: a process that has run torch already has threads, which a fork would lose.
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory(prefix="natgrad-ranks-") as folder:
        pipes, processes = [], []
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe()
                start = Start(rank, ranks, folder, threads, timeout)
                process = context.Process(target=_run_rank, args=(theirs, start), daemon=True)
                process.start()
                theirs.close()  # so that reading ours ends when the process does
                pipes.append(ours)
                processes.append(process)
            for pipe in pipes:
                pipe.send_bytes(job)
            answers = _collect(pipes, processes)
            for pipe in pipes:
                pipe.send_bytes(b"leave")
            for process in processes:
                process.join()
            return answers
        finally:
            for process in processes:
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()


def shard(model: nn.Module) -> nn.Module:
    """A model sharded over all ranks by FSDP2.

    Arguments:
        model: on every rank the same; sharded in place. Each child with parameters becomes a unit
            of its own.
    """
    from torch.distributed.fsdp import fully_shard

    for child in model.children():
        if any(True for _ in child.parameters()):
            fully_shard(child)
    fully_shard(model)
    return model


def _collect(pipes: list[Connection], processes: list[Any]) -> list[Any]:
    answers: dict[int, Any] = {}
    while len(answers) < len(pipes):
        waiting = {pipes[rank]: rank for rank in range(len(pipes)) if rank not in answers}
        for pipe in wait(list(waiting)):
            assert isinstance(pipe, Connection)
            rank = waiting[pipe]
            try:
                good, answer = pickle.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                processes[rank].join()
                raise RankError(
                    f"Rank {rank} of {len(pipes)} ended with code {processes[rank].exitcode} "
                    "before it was done: look at what it printed, and whether memory ran out."
                ) from None
            if not good:
                raise answer
            answers[rank] = answer
    return [answers[rank] for rank in range(len(pipes))]


def _run_rank(pipe: Connection, start: Start) -> None:
    """The life of a rank: connect, call, answer, and stay until all others have answered."""
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends all ranks
    try:
        answer = pickle.dumps((True, _call_function(pipe, start)))
    except Exception as error:
        answer = pickle.dumps((False, _picklable(error, start)))
    try:
        pipe.send_bytes(answer)
        # Were it to leave now, others would only see a broken connection.
        pipe.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()


def _call_function(pipe: Connection, start: Start) -> object:
    function, args = pickle.loads(pipe.recv_bytes())
    torch.set_num_threads(start.threads)
    dist.init_process_group(
        "gloo",
        init_method=(Path(start.folder) / "store").as_uri(),
        rank=start.rank,
        world_size=start.ranks,
        timeout=timedelta(seconds=start.timeout),
    )
    return function(*args)


def _picklable(error: Exception, start: Start) -> Exception:
    """An error that can be pickled, and says where it is from."""
    if isinstance(error, NatgradError):
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            pass
        else:
            return error
    return RankError(
        f"Rank {start.rank} of {start.ranks} failed with {type(error).__name__}: {error}\n"
        f"{traceback.format_exc()}"
    )


def _end_with_the_parent() -> None:
    """A rank whose parent was killed has nobody left to end it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
