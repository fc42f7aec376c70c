"""Scratch buffers that are reused: fresh large ones cost more in page faults than in work.

Every thread has buffers of its own. Two trainings in two threads of one process would otherwise
write into the same ones, and a thread that is interrupted between two products would go on with
another one's numbers.
"""

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from math import prod

import torch
from torch import Tensor

_SMALL = 10 << 20  # bytes that are always kept


class _Scratch(threading.local):
    """Made anew, and empty, in each thread that asks for it."""

    def __init__(self) -> None:
        self.limit = _SMALL
        self.buffers: OrderedDict[Hashable, Tensor] = OrderedDict()


_scratch = _Scratch()


def workspace(key: Hashable, shape: Sequence[int], like: Tensor, zero: bool = False) -> Tensor:
    """A buffer of ``shape``, with ``like``'s dtype and device, holding what its last user left.

    ``zero`` buffers are zeroed when first made, and only then.
    """
    buffers = _scratch.buffers
    full = (key, tuple(shape), like.dtype, like.device)
    if (found := buffers.get(full)) is not None:
        buffers.move_to_end(full)
        return found
    made = (torch.zeros if zero else torch.empty)(
        tuple(shape), dtype=like.dtype, device=like.device
    )
    size = prod(shape) * like.element_size()
    if size <= _scratch.limit:
        while buffers and held() + size > _scratch.limit:
            buffers.popitem(last=False)
        buffers[full] = made
    return made


def allow(size: int) -> None:
    """Keep ``size`` more bytes from now on, for a caller that needs them at every step."""
    _scratch.limit = max(_scratch.limit, _SMALL + size)


def held() -> int:
    """Bytes in this thread's buffers."""
    return sum(b.numel() * b.element_size() for b in _scratch.buffers.values())


def release() -> None:
    """Give this thread's buffers back."""
    _scratch.buffers.clear()
