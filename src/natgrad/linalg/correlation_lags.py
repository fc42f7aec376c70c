"""Which correlation blocks of a stride-1 convolution are distinct: its shape alone says it.

With ``a[p]`` the patch at output position ``p``, the input factor ``sum_p a[p] a[p]^T`` has blocks

    A[(u,v), (u',v')] = sum_{q in window(u,v)} x[q] x[q + lag]^T,    lag = (u'-u, v'-v).

The windows of two taps differ by border strips only. So, by inclusion and exclusion, a block is the
sum over row terms and column terms of ``+-kept[lag, row term, column term]``, where a term of an
axis is the whole image (+) or one row or column that the window leaves out (-).
"""

from dataclasses import dataclass
from functools import lru_cache

from natgrad.errors import SettingError

# The first term of an axis. The others are strips: those at its beginning, then those at its end.
WHOLE = 0


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of a stride-1 convolution."""

    taps: int
    before: int
    after: int
    dilation: int

    def output_size(self, size: int) -> int:
        return max(0, size + self.before + self.after - self.dilation * (self.taps - 1))

    def window(self, tap: int, size: int) -> slice:
        """The positions of an image that this tap sees."""
        first = tap * self.dilation - self.before
        stop = first + self.output_size(size)
        return slice(max(0, first), max(0, min(size, stop)))

    def strips(self, tap: int, partner: int) -> tuple[int, int]:
        """How many pairs the window of two taps leaves out at the beginning and at the end."""
        low, high = min(tap, partner), max(tap, partner)
        beginning = low * self.dilation - self.before
        end = (self.taps - 1 - high) * self.dilation - self.after
        return max(0, beginning), max(0, end)

    def most_strips(self, lag: int) -> tuple[int, int]:
        """The largest ``strips`` of any two taps with this lag."""
        last = self.taps - 1
        beginning, _ = self.strips(last - abs(lag), last)
        _, end = self.strips(0, abs(lag))
        return beginning, end

    def term_count(self, lag: int) -> int:
        return 1 + sum(self.most_strips(lag))

    def terms(self, tap: int, partner: int) -> list[tuple[int, int]]:
        """The ``(term, sign)`` that make up the window of two taps."""
        beginning, end = self.strips(tap, partner)
        first_at_end = WHOLE + 1 + self.most_strips(partner - tap)[0]
        left_out = [*range(WHOLE + 1, WHOLE + 1 + beginning)]
        left_out += range(first_at_end, first_at_end + end)
        return [(WHOLE, 1)] + [(strip, -1) for strip in left_out]

    def span(self, term: int, lag: int, size: int) -> tuple[int, int]:
        """``(first, count)`` of a term's pairs, by the lower position of each.

        The upper one lies ``|lag|`` taps further. A strip that a small image lacks counts zero.
        """
        pairs = max(0, size - abs(lag) * self.dilation)
        if term == WHOLE:
            return 0, pairs
        beginning, _ = self.most_strips(lag)
        strip = term - WHOLE - 1
        first = strip if strip < beginning else pairs - 1 - (strip - beginning)
        return first, int(0 <= first < pairs)


@dataclass(frozen=True, slots=True)
class ConvGeometry:
    """A stride-1 convolution; one dimension is the kernel ``(1, k)``.

    ``padding`` is ``((top, bottom), (left, right))``, of zeros.
    """

    kernel: tuple[int, int]
    padding: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))
    dilation: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        if min(*self.kernel, *self.dilation) < 1:
            raise SettingError(
                f"A convolution needs kernel and dilation of at least 1, "
                f"but they are {self.kernel} and {self.dilation}."
            )
        if min(*self.padding[0], *self.padding[1]) < 0:
            raise SettingError(
                f"Padding must be at least 0, but is {self.padding}. Crop the input instead."
            )

    @property
    def rows(self) -> Axis:
        return Axis(self.kernel[0], *self.padding[0], self.dilation[0])

    @property
    def columns(self) -> Axis:
        return Axis(self.kernel[1], *self.padding[1], self.dilation[1])

    @property
    def taps(self) -> list[tuple[int, int]]:
        """In the order of the features."""
        return [(u, v) for u in range(self.kernel[0]) for v in range(self.kernel[1])]

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        return self.rows.output_size(height), self.columns.output_size(width)

    def column_lags(self, row_lag: int) -> tuple[int, ...]:
        """The other half of row lag 0 are transposes."""
        reach = self.kernel[1] - 1
        return tuple(range(0 if row_lag == 0 else -reach, reach + 1))


@dataclass(frozen=True, slots=True)
class Tile:
    """Blocks of consecutive column lags, made by one product, and how many blocks lie before it."""

    row_lag: int
    row_term: int
    column_lags: tuple[int, ...]
    column_term: int
    offset: int


@lru_cache(maxsize=256)
def tiles_of(geometry: ConvGeometry) -> tuple[Tile, ...]:
    """All distinct blocks. Those of whole rows come in one tile, as one product makes them."""
    tiles, offset = [], 0
    for row_lag in range(geometry.rows.taps):
        lags = geometry.column_lags(row_lag)
        for row_term in range(geometry.rows.term_count(row_lag)):
            tiles.append(Tile(row_lag, row_term, lags, WHOLE, offset))
            offset += len(lags)
            for lag in lags:
                for column_term in range(WHOLE + 1, geometry.columns.term_count(lag)):
                    tiles.append(Tile(row_lag, row_term, (lag,), column_term, offset))
                    offset += 1
    return tuple(tiles)


def block_count(geometry: ConvGeometry) -> int:
    last = tiles_of(geometry)[-1]
    return last.offset + len(last.column_lags)


@lru_cache(maxsize=256)
def signs(geometry: ConvGeometry) -> tuple[tuple[int, ...], ...]:
    """``[pairs, blocks]``: how the block of two taps, ``i <= j``, is made of the distinct ones."""
    rows, columns = geometry.rows, geometry.columns
    keys = [
        (tile.row_lag, tile.row_term, lag, tile.column_term)
        for tile in tiles_of(geometry)
        for lag in tile.column_lags
    ]
    index = {key: i for i, key in enumerate(keys)}
    out = []
    for i, tap in enumerate(geometry.taps):
        for partner in geometry.taps[i:]:
            line = [0] * len(keys)
            for row_term, row_sign in rows.terms(tap[0], partner[0]):
                for column_term, column_sign in columns.terms(tap[1], partner[1]):
                    lags = partner[0] - tap[0], partner[1] - tap[1]
                    line[index[lags[0], row_term, lags[1], column_term]] = row_sign * column_sign
            out.append(tuple(line))
    return tuple(out)
