"""What ranks of a launch do in tests; processes that are not forked find it by its name."""

import os

import torch
import torch.distributed as dist

from natgrad.comm import connect
from natgrad.errors import NatgradError, SettingError


class TwoWordsError(NatgradError):
    """Can be pickled, but not read again."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first + second)


def about(word: str) -> tuple[str, int, list[int], int]:
    comm = connect()
    return word, comm.rank, comm.gather(10 * comm.rank), torch.get_num_threads()


def setting() -> None:
    """Rank 1 is wrong; rank 0 would wait for it for minutes."""
    if dist.get_rank() == 1:
        raise SettingError("This is wrong: do that.")
    dist.barrier()


def other_error(kind: str) -> None:
    if kind == "natgrad":
        raise TwoWordsError("one", "two")
    raise KeyError("missing")


def death() -> None:
    os._exit(3)
