"""Scratch buffers that are reused: fresh large ones cost more in page faults than in work."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from math import prod

import torch
from torch import Tensor

_SMALL = 10 << 20  # bytes that are always kept
_limit = _SMALL
_buffers: OrderedDict[Hashable, Tensor] = OrderedDict()


def workspace(key: Hashable, shape: Sequence[int], like: Tensor, zero: bool = False) -> Tensor:
    """A buffer of ``shape``, with ``like``'s dtype and device, holding what its last user left.

    ``zero`` buffers are zeroed when first made, and only then.
    """
    full = (key, tuple(shape), like.dtype, like.device)
    if (found := _buffers.get(full)) is not None:
        _buffers.move_to_end(full)
        return found
    made = (torch.zeros if zero else torch.empty)(
        tuple(shape), dtype=like.dtype, device=like.device
    )
    size = prod(shape) * like.element_size()
    if size <= _limit:
        while _buffers and held() + size > _limit:
            _buffers.popitem(last=False)
        _buffers[full] = made
    return made


def allow(size: int) -> None:
    """Keep ``size`` bytes more than usual from now on, for somebody who needs them every step."""
    global _limit
    _limit = max(_limit, _SMALL + size)


def held() -> int:
    """Bytes in cached buffers."""
    return sum(b.numel() * b.element_size() for b in _buffers.values())


def release() -> None:
    """Give all cached buffers back."""
    _buffers.clear()
