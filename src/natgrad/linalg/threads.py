"""Several decompositions at a time, one thread each.

LAPACK's symmetric eigendecomposition gains little from a second thread, so the blocks of a model
are decomposed side by side instead of one after the other with all threads. Each needs memory of
its own, so there are at most 8 at a time, and callers keep large matrices out of it.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")

# Each needs memory of its own.
_WORKERS = 8


def at_once() -> int:
    """How many calls ``spread`` runs at a time, if there are that many."""
    return min(torch.get_num_threads(), _WORKERS)


def spread(calls: Sequence[Callable[[], T]]) -> Iterator[T]:
    """What ``calls`` return, in turn, several at a time, which share the threads that torch has.

    They start in this order, so the longest should come first. Gradients are not recorded."""
    threads = torch.get_num_threads()
    workers = min(at_once(), len(calls))
    if workers < 2:
        for call in calls:
            with torch.no_grad():
                result = call()
            yield result
            del result  # before the next one is made
        return
    # What a thread sets is also that of all threads to come, so torch has to be told again after.
    pool = ThreadPoolExecutor(workers, "natgrad", torch.set_num_threads, (threads // workers,))
    try:
        yield from pool.map(torch.no_grad()(lambda call: call()), calls)
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)
