"""Patches of an image as rows (im2col), a cache-sized piece at a time.

im2col multiplies the size of the activations by that of the kernel. Pieces that are multiplied as
soon as they are written never leave the cache. Convolutions of stride 1 mostly do without patches:
see `natgrad.linalg.correlation`.
"""

from collections.abc import Iterator, Sequence
from math import prod

import torch.nn.functional as F
from torch import Tensor

from natgrad.linalg.workspace import workspace

# About 2 MB of float32: larger pieces fall out of the cache between writing and multiplying.
_PIECE = 1 << 19


def channels_last(x: Tensor, padding: Sequence[tuple[int, int]]) -> Tensor:
    """``x [n, c, *space]`` -> zero-padded and contiguous ``[n, *space, c]``."""
    if any(before or after for before, after in padding):
        x = F.pad(x, [side for pair in reversed(padding) for side in pair])
    return x.movedim(1, -1).contiguous()


def windows(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """``x [n, *space, c]`` -> view ``[n, *out, *kernel, c]``; nothing is copied."""
    size, step = x.shape[1:-1], x.stride()[1:-1]
    out = [
        max(0, (h - d * (k - 1) - 1) // s + 1)
        for h, k, s, d in zip(size, kernel, stride, dilation, strict=True)
    ]
    return x.as_strided(
        (len(x), *out, *kernel, x.shape[-1]),
        (
            x.stride(0),
            *(a * s for a, s in zip(step, stride, strict=True)),
            *(a * d for a, d in zip(step, dilation, strict=True)),
            1,
        ),
    )


def patch_rows(view: Tensor, dims: int, groups: int) -> Tensor:
    """``view [n, *out, *kernel, c]`` -> ``[groups, n, out, kernel * c/groups]``, channels last."""
    n, out, kernel = view.shape[0], view.shape[1 : 1 + dims], view.shape[1 + dims : -1]
    if groups == 1:
        return view.reshape(1, n, prod(out), prod(kernel) * view.shape[-1])
    split: Tensor = view.unflatten(-1, (groups, -1)).movedim(-2, 0)
    return split.reshape(groups, n, prod(out), -1)


def patch_pieces(
    x: Tensor,
    padding: Sequence[tuple[int, int]],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Iterator[Tensor]:
    """The patches of ``x [n, c, *space]``, zero-padded, as ``[groups, rows, kernel * c/groups]``
    in the order of ``patch_rows``, some samples at a time."""
    n, dims = len(x), x.ndim - 2
    probe = windows(channels_last(x[:1], padding), kernel, stride, dilation)
    each = prod(probe.shape[1:])
    if n == 0 or each == 0:
        return
    count = max(1, min(n, _PIECE // each))
    inside = tuple(
        slice(before, before + size) for (before, _), size in zip(padding, x.shape[2:], strict=True)
    )
    space = [
        before + size + after for (before, after), size in zip(padding, x.shape[2:], strict=True)
    ]
    # The border is zeroed once, when the buffer is made; its position is part of the buffer's key.
    key = ("padded", tuple(x.shape[2:]), tuple(padding))
    board = workspace(key, (count, *space, x.shape[1]), x, zero=True)
    for start in range(0, n, count):
        piece = x[start : start + count]
        board[(slice(len(piece)), *inside)].copy_(piece.movedim(1, -1))
        view = windows(board[: len(piece)], kernel, stride, dilation)
        if groups > 1:
            yield patch_rows(view, dims, groups).flatten(1, 2)
            continue
        # A fresh temporary would be paged in anew for every piece.
        rows = workspace("patches", (count * each,), x)[: len(piece) * each]
        rows.view(view.shape).copy_(view)
        yield rows.view(1, -1, prod(view.shape[1 + dims :]))
