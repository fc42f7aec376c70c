"""Several decompositions at a time: LAPACK gains little from a second thread, a second one all."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def spread(calls: Sequence[Callable[[], T]]) -> list[T]:
    """What ``calls`` return, each made by one thread, as many at a time as torch has threads.

    They start in this order, so the longest should come first. Gradients are not recorded."""
    threads = torch.get_num_threads()
    if min(threads, len(calls)) < 2:
        with torch.no_grad():
            return [call() for call in calls]
    workers = min(threads, len(calls))
    # A thread's number of threads is partly the whole process's: torch has to be told again after.
    pool = ThreadPoolExecutor(workers, "natgrad", torch.set_num_threads, (1,))
    try:
        return list(pool.map(torch.no_grad()(lambda call: call()), calls))
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
