"""Correlations of whole rows by a Fourier transform along them: fewer products than lag by lag.

With ``z[f]`` the transform of a row, padded so that no lag wraps around, all column lags of two
rows come from one product per frequency instead of one per lag:

    sum_w x[w] x'[w + d]^T = sum_f re(exp(2 pi i f d / L) conj(z[f]) z'[f]^T),    L >= W + reach

Real and imaginary parts stand below each other, ``[2 c, rows * images]``, so a product has twice
as many rows and columns, too. For a 3x3 kernel that is about half the work of 13 lags. Images with
too few rows or channels go lag by lag (`natgrad.linalg.correlation`).

A transform along columns as well was tried and not taken: half the operations again, but the data
pass through memory once more, and it saved hardly any time.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import pi, sqrt

import torch
from torch import Tensor

from natgrad.linalg.correlation_lags import WHOLE, ConvGeometry, Tile, tiles_of
from natgrad.linalg.workspace import workspace

# Numbers in a chunk of images: it and its transform stay near the cache. More channels make larger
# sums, which more images repay.
_CHUNK, _WIDE_CHUNK, _WIDE = 1 << 19, 1 << 20, 64
# Numbers in sums that are brought back from frequencies to lags at once.
_SUMS = 1 << 18
# Numbers in a part of a cache that has one line for each address modulo its size.
_APART = 256
# What a transform must spare, as its products are not the only work.
_GAIN = 0.8


@dataclass(frozen=True, eq=False)
class Transform:
    """``forward [L, W]``: rows are the real and the imaginary part of each frequency in turn.

    ``backward [lags, L]`` makes the lags, from ``-reach`` on, of the real parts of all frequencies
    and then the imaginary ones. Frequencies are odd halves, so none of them is real.
    """

    forward: Tensor
    backward: Tensor


@lru_cache(maxsize=64)
def transform(
    width: int, reach: int, dilation: int, dtype: torch.dtype, device: torch.device
) -> Transform:
    size = _length(width, reach * dilation)
    angles = (2 * torch.arange(size // 2, dtype=torch.float64) + 1) * (pi / size)
    forward = angles[:, None] * torch.arange(width, dtype=torch.float64)
    forward = torch.stack([torch.cos(forward), -torch.sin(forward)], 1).flatten(0, 1)
    backward = torch.arange(-reach, reach + 1, dtype=torch.float64)[:, None] * dilation * angles
    backward = torch.cat([torch.cos(backward), -torch.sin(backward)], 1)
    return Transform((forward * sqrt(2 / size)).to(device, dtype), backward.to(device, dtype))


def pays(n: int, channels: int, height: int, width: int, geometry: ConvGeometry) -> bool:
    """Whether products of frequencies, with the transform itself, are clearly less than of lags."""
    reach = geometry.kernel[1] - 1
    size = _length(width, reach * geometry.dilation[1])
    row_lags = range(geometry.kernel[0])
    frequencies = size * (width / channels + 2 * len(row_lags))
    lags = (width + reach) * sum(len(geometry.column_lags(lag)) for lag in row_lags)
    # With few rows, sums of frequencies take longer to read than to make.
    return 3 * n * height >= channels >= 8 and frequencies < _GAIN * lags


def add(kept: dict[Tile, Tensor], x: Tensor, geometry: ConvGeometry, alpha: float) -> None:
    """``kept[tile] [c, lags, c] += alpha *`` the sum of the tile over ``x [n, c, h, w]``."""
    n, c, height, width = x.shape
    reach, dilation = geometry.kernel[1] - 1, geometry.dilation[1]
    through = transform(width, reach, dilation, x.dtype, x.device)
    tiles = tiles_of(geometry)
    rows = [tile for tile in tiles if tile.column_term == WHOLE]
    # Many small sums are brought back at once, large ones one by one.
    together = max(1, _SUMS // (2 * c * c * len(through.forward)))
    groups = [rows[i : i + together] for i in range(0, len(rows), together)]
    strips = [strip for tile in tiles if (strip := _strip(tile, geometry, width)) is not None]
    columns = sorted({column for _, left, right in strips for column in (left, right)})
    border = workspace("border", (len(columns), c, height, n), x)
    most = max(1, (_CHUNK if c < _WIDE else _WIDE_CHUNK) // (c * height * width))
    for first in range(0, n, most):
        images = x[first : first + most]
        count = len(images)
        # Channels a power of two apart would meet in the same few lines of a cache, so one more
        # image may move them. It is zeroed once, when the buffer is made, so that a buffer of this
        # shape with an image in that place needs another key.
        places = count + (height * count % _APART == 0)
        board = workspace(("rows", count), (c, height, places, width), x, zero=True)
        board[:, :, :count].copy_(images.permute(1, 2, 0, 3))
        for index, column in enumerate(columns):
            border[index, :, :, first : first + most].copy_(board[:, :, :count, column])
        spectrum = workspace("spectrum", (len(through.forward), board.numel() // width), x)
        torch.mm(through.forward, board.flatten(0, 2).mT, out=spectrum)
        # [frequencies, 2 c, rows * images]: other rows of all images are other columns.
        frequencies = spectrum.view(-1, 2 * c, height, places)
        for group in groups:
            spans = [_spans(frequencies, tile, geometry) for tile in group]
            for tile, lags in zip(group, _lags(spans, through), strict=True):
                kept[tile].add_(lags[:, tile.column_lags[0] + reach :], alpha=alpha)
    for tile, one, other in strips:
        left, _ = _spans(border[columns.index(one)], tile, geometry)
        _, right = _spans(border[columns.index(other)], tile, geometry)
        kept[tile][:, 0].addmm_(left.flatten(1), right.flatten(1).mT, alpha=alpha)


def _length(width: int, reach: int) -> int:
    """Of a transform: even, and long enough that the largest lag does not wrap around."""
    return width + reach + (width + reach) % 2


def _spans(z: Tensor, tile: Tile, geometry: ConvGeometry) -> tuple[Tensor, Tensor]:
    """The rows of ``z [..., h, n]`` whose pairs the tile sums, and their partners."""
    first, count = geometry.rows.span(tile.row_term, tile.row_lag, z.shape[-2])
    partner = first + tile.row_lag * geometry.rows.dilation
    if not count:  # an image that is too small for it
        first = partner = 0
    return z.narrow(-2, first, count), z.narrow(-2, partner, count)


def _strip(tile: Tile, geometry: ConvGeometry, width: int) -> tuple[Tile, int, int] | None:
    """A tile that is a border column with its left and right columns, if the image has them."""
    if tile.column_term == WHOLE:
        return None
    lag = tile.column_lags[0]
    first, count = geometry.columns.span(tile.column_term, lag, width)
    left = first + max(0, -lag) * geometry.columns.dilation
    return (tile, left, left + lag * geometry.columns.dilation) if count else None


def _lags(spans: list[tuple[Tensor, Tensor]], through: Transform) -> Tensor:
    """``[spans, c, lags, c]`` of pairs of ``[frequencies, 2 c, rows, images]``."""
    like = spans[0][0]
    count, c = len(like), like.shape[1] // 2
    products = workspace("frequencies", (len(spans), count, 2, c, 2, c), like)
    for (left, right), out in zip(spans, products.flatten(2, 3).flatten(3, 4), strict=True):
        torch.bmm(left.flatten(2), right.flatten(2).mT, out=out)
    # conj(z) z' = (re re' + im im') + i (re im' - im re')
    sums = workspace("parts of frequencies", (len(spans), 2, count, c, c), like)
    torch.add(products[:, :, 0, :, 0], products[:, :, 1, :, 1], out=sums[:, 0])
    torch.sub(products[:, :, 0, :, 1], products[:, :, 1, :, 0], out=sums[:, 1])
    lags = through.backward @ sums.view(len(spans), 2 * count, c * c)
    return lags.view(len(spans), -1, c, c).transpose(1, 2)
