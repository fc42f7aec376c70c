"""The input factor of a stride-1 convolution from its distinct correlation blocks, without im2col.

    A = sum_p a[p] a[p]^T,    a[p] the patch at p: (kernel row, kernel column, channel), then a 1

A 3x3 kernel with padding 1 has 13 lags, 12 border strips and 4 corners (`correlation_lags`): 29
blocks C x C instead of 81, 6 times less work and 0.36 times the numbers to keep and send.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from natgrad.linalg import fourier_correlation
from natgrad.linalg.correlation_lags import WHOLE, ConvGeometry, Tile, block_count, signs, tiles_of
from natgrad.linalg.forms import Form
from natgrad.linalg.half_products import accumulate
from natgrad.linalg.workspace import workspace

__all__ = ["ConvGeometry", "Correlations"]

# Numbers on one canvas: larger ones leave the cache between the products.
_CANVAS = 1 << 20
# Fewer channels than this leave most of a vector unit idle.
_NARROW = 16
# From this many channels on, one product is enough work for all threads.
_WIDE = 128
# Channels over image width from which on records cost less than gaps.
_RECORDS = 6


@dataclass(frozen=True, slots=True)
class Canvas:
    """Images as one run of pixels ``[lanes, pixels, record * c]`` in which lags are distances.

    The order is ``(row, image, column, channel)``, so that any rows of all images are one span, and
    columns are sorted by their remainder modulo the dilation, so that neighbouring taps see
    neighbouring pixels. Where a partner lies outside the image there must be a zero: either gaps
    part the images, or each pixel is stored with its neighbours, as a record with zeros in it.
    Lanes are independent sets of images.
    """

    pixels: Tensor
    height: int
    width: int
    images: int
    segment: int
    dilation: int
    record: int

    @property
    def line(self) -> int:
        """Pixels in a row of one image."""
        return self.dilation * self.segment

    @property
    def row(self) -> int:
        """Pixels in a row of all images."""
        return self.images * self.line

    def column(self, index: int) -> int:
        return index % self.dilation * self.segment + index // self.dilation

    def window(self, first: int, lag: int, count: int, step: int, width: int) -> Tensor:
        """``[lanes, count, width * c]``: every ``step``-th pixel from ``first``, without a copy.

        Seen are ``width`` neighbours of each, beginning ``lag`` columns to the right of it.
        """
        lanes, _, size = self.pixels.shape
        c = size // self.record
        strides = (self.pixels.stride(0), step * size, 1)
        start = first * size + (self.record // 2 + lag) * c
        return self.pixels.as_strided((lanes, count, width * c), strides, start)


def paint(x: Tensor, lanes: int, geometry: ConvGeometry, stack: int, records: bool) -> Canvas:
    """``x [lanes * images, c, h, w]`` on a canvas with rows of a multiple of ``stack`` pixels."""
    n, c, height, width = x.shape
    images, dilation, reach = n // lanes, geometry.dilation[1], geometry.kernel[1] - 1
    record, gap = (2 * reach + 1, 0) if records else (1, reach)
    segment = -(-width // dilation) + gap
    segment += -segment % stack
    inside = height * images * dilation * segment
    # Zeros are written once, when the buffer is made; the layout is part of the buffer's key.
    key = ("correlation", height, width, images, segment, dilation, record)
    pixels = workspace(key, (lanes, inside + gap, record * c), x, zero=True)
    board = pixels[:, :inside].view(lanes, height, images, dilation, segment, record, c)
    centre = board[:, :, :, :, :, record // 2]
    source = x.unflatten(0, (lanes, images)).permute(0, 3, 1, 4, 2)
    for remainder in range(min(dilation, width)):
        columns = source[:, :, :, remainder::dilation]
        centre[:, :, :, remainder, : columns.shape[3]].copy_(columns)
    for shift in range(1, min(record // 2 + 1, segment)):
        board[:, :, :, :, :-shift, record // 2 + shift].copy_(centre[:, :, :, :, shift:])
        board[:, :, :, :, shift:, record // 2 - shift].copy_(centre[:, :, :, :, :-shift])
    return Canvas(pixels, height, width, images, segment, dilation, record)


def rounds(n: int, lanes: int, most: int) -> Iterator[tuple[int, int, int]]:
    """``(first image, lanes, images a lane)`` of canvases that cover ``n`` images and no more."""
    first = 0
    while first < n:
        lanes = min(lanes, n - first)
        images = min(most, (n - first) // lanes)
        yield first, lanes, images
        first += lanes * images


class Correlations(Form):
    """The distinct blocks of the factor; with a bias also its row, which is the sum of patches."""

    batch = 1

    def __init__(self, channels: int, geometry: ConvGeometry, bias: bool) -> None:
        self.channels, self.geometry, self.bias = channels, geometry, bias
        self.dim = channels * len(geometry.taps) + bias
        self._end = block_count(geometry) * channels**2
        self.numel = self._end + bias * self.dim
        # With few channels, 2 or 4 neighbouring pixels go into one product, to make it less thin.
        self._stack = 4 if 4 * channels <= _NARROW else 2 if 2 * channels <= _NARROW else 1

    @staticmethod
    def pays(geometry: ConvGeometry) -> bool:
        """Whether these are fewer blocks than the triangle of the whole factor has."""
        taps = len(geometry.taps)
        return block_count(geometry) < taps * (taps + 1) // 2

    def add(self, kept: Tensor, x: Tensor, alpha: float = 1.0) -> int:
        """``kept += alpha * sum a a^T`` over the patches of ``x [n, c, h, w]``; their number."""
        height, width = self.geometry.output_size(*x.shape[2:])
        positions = len(x) * height * width
        if positions:
            self._add_blocks(kept[: self._end], x, alpha)
            if self.bias:
                self._add_bias(kept[self._end :], x, positions, alpha)
        return positions

    def _add_blocks(self, kept: Tensor, x: Tensor, alpha: float) -> None:
        n, c, height, width = x.shape
        if fourier_correlation.pays(n, c, height, width, self.geometry):
            views = {tile: view.view(c, -1, c) for tile, view in self._views(kept)}
            fourier_correlation.add(views, x.to(kept.dtype), self.geometry, alpha)
            return
        wide = c >= _WIDE
        # Gaps cost products, some width-th of all; records cost copies, which many channels repay.
        records = wide and c >= _RECORDS * width
        lanes = 1 if wide else min(n, max(4, min(16, torch.get_num_threads())))
        most = max(1, (1 + records) * _CANVAS // (lanes * height * width * c))
        sums = self._views(kept) if wide else self._lane_sums(kept, lanes)
        for first, used, images in rounds(n, lanes, most):
            batch = x[first : first + used * images]
            canvas = paint(batch, used, self.geometry, self._stack, records)
            for tile, total in sums:
                self._multiply(canvas, tile, total[:used], alpha if wide else 1.0)
        if not wide:
            self._fold(kept, sums, alpha)

    def _views(self, kept: Tensor) -> list[tuple[Tile, Tensor]]:
        """Every tile of ``kept`` as ``[1, c, lags * c]``."""
        tiles, c = tiles_of(self.geometry), self.channels
        parts = kept.split([len(tile.column_lags) * c * c for tile in tiles])
        return [(tile, part.view(1, c, -1)) for tile, part in zip(tiles, parts, strict=True)]

    def _lane_sums(self, kept: Tensor, lanes: int) -> list[tuple[Tile, Tensor]]:
        """Zeros ``[lanes, s * c, (s + lags - 1) * c]`` for every tile; ``s`` pixels are stacked.

        Each lane has its own sums, as small products use several threads only when batched.
        """
        tiles, c = tiles_of(self.geometry), self.channels
        stacks = [self._stack if tile.column_term == WHOLE else 1 for tile in tiles]
        shapes = [
            (s * c, (s + len(tile.column_lags) - 1) * c)
            for s, tile in zip(stacks, tiles, strict=True)
        ]
        sizes = [lanes * rows * columns for rows, columns in shapes]
        # Contiguous for each tile: a batched product into anything else becomes a loop of products.
        parts = workspace("lane sums", (sum(sizes),), kept).zero_().split(sizes)
        return [
            (tile, part.view(lanes, *shape))
            for tile, part, shape in zip(tiles, parts, shapes, strict=True)
        ]

    def _fold(self, kept: Tensor, sums: list[tuple[Tile, Tensor]], alpha: float) -> None:
        """Add up the lanes, and the diagonal of stacks: pixel ``i`` meets pixel ``i + lag``."""
        c = self.channels
        for (_, out), (tile, total) in zip(self._views(kept), sums, strict=True):
            lanes, high, wide = total.shape
            each = total.as_strided(
                (lanes, high // c, c, len(tile.column_lags) * c),
                (total.stride(0), c * wide + c, wide, 1),
                total.storage_offset(),
            )
            out[0].add_(each.sum((0, 1)), alpha=alpha)

    def _multiply(self, canvas: Canvas, tile: Tile, out: Tensor, alpha: float) -> None:
        """``out [lanes, s * c, (s + lags - 1) * c] += alpha * sum`` of ``tile`` over the canvas."""
        stack = out.shape[1] // self.channels
        rows, columns = self.geometry.rows, self.geometry.columns
        row, row_count = rows.span(tile.row_term, tile.row_lag, canvas.height)
        start, lag = row * canvas.row, tile.column_lags[0]
        shift = tile.row_lag * rows.dilation * canvas.row
        if tile.column_term == WHOLE:
            end = start + row_count * canvas.row
            width = stack + len(tile.column_lags) - 1
            # Windows that overlap in memory are not a matrix: without records, every ``step``-th
            # pixel is taken in turn.
            step = 1 if canvas.record > 1 else width + -width % stack
            turns = range(start, min(end, start + step), stack)
            spans = [(first, -(-(end - first) // step)) for first in turns]
        else:
            column, found = columns.span(tile.column_term, lag, canvas.width)
            start += canvas.column(column + max(0, -lag) * columns.dilation)
            spans = [(start, row_count * canvas.images)] if row_count * found else []
            step, width = canvas.line, 1
        for first, count in spans:
            left = canvas.window(first, 0, count, step, stack)
            right = canvas.window(first + shift, lag, count, step, width)
            accumulate(out, left.mT, right, alpha)

    def _add_bias(self, kept: Tensor, x: Tensor, positions: int, alpha: float) -> None:
        """``kept [dim] += alpha * sum`` of the patches with their constant 1."""
        image = x.sum(0, dtype=kept.dtype)
        rows, columns = self.geometry.rows, self.geometry.columns
        bands = [image[:, rows.window(u, image.shape[1])].sum(1) for u in range(rows.taps)]
        sums = [
            band[:, columns.window(v, image.shape[2])].sum(1)
            for band in bands
            for v in range(columns.taps)
        ]
        kept[:-1].add_(torch.cat(sums), alpha=alpha)
        kept[-1:].add_(alpha * positions)

    def _blocks(self, kept: Tensor) -> Tensor:
        """The distinct blocks, ``[blocks, c, c]``, in the order of ``signs``."""
        c = self.channels
        views = [view.view(c, -1, c).transpose(0, 1) for _, view in self._views(kept[: self._end])]
        return torch.cat(views)

    def dense(self, kept: Tensor) -> Tensor:
        c, taps = self.channels, len(self.geometry.taps)
        rows, columns = torch.triu_indices(taps, taps, device=kept.device)
        weights = _weights(self.geometry, kept.dtype, kept.device)
        upper = (weights @ self._blocks(kept).flatten(1)).unflatten(1, (c, c))
        on_diagonal = rows == columns  # products are symmetric up to rounding only
        upper[on_diagonal] = (upper[on_diagonal] + upper[on_diagonal].mT) / 2
        out = kept.new_empty(1, self.dim, self.dim)
        size = taps * c
        board = out[0, :size, :size].unflatten(0, (taps, c)).unflatten(2, (taps, c))
        blocks = board.transpose(1, 2)  # [taps, taps, c, c], a view of out
        blocks[columns, rows] = upper.mT
        blocks[rows, columns] = upper
        if self.bias:
            out[0, -1] = out[0, :, -1] = kept[self._end :]
        return out

    def trace(self, kept: Tensor) -> Tensor:
        total = kept.new_zeros(1)
        for sign, (tile, view) in zip(
            _trace_signs(self.geometry), self._views(kept[: self._end]), strict=True
        ):
            if sign:  # of its block without a lag, which is the first one
                assert tile.column_lags[0] == 0
                total += sign * view[0, :, : self.channels].diagonal().sum()
        return total + kept[-1:] if self.bias else total


@lru_cache(maxsize=256)
def _weights(geometry: ConvGeometry, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``signs`` as a tensor ``[pairs, blocks]``."""
    return torch.tensor(signs(geometry), dtype=dtype, device=device)


@lru_cache(maxsize=256)
def _trace_signs(geometry: ConvGeometry) -> tuple[int, ...]:
    """How often the first block of every tile is on the diagonal of the factor."""
    taps = len(geometry.taps)
    rows, columns = torch.triu_indices(taps, taps)
    total = torch.tensor(signs(geometry))[rows == columns].sum(0).tolist()
    return tuple(int(total[tile.offset]) for tile in tiles_of(geometry))
