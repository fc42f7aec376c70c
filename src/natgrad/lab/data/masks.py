"""Masks of instances from COCO's polygons and run lengths, ``[h, w]`` of zeros and ones."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Mask: TypeAlias = npt.NDArray[np.uint8]


def mask(segmentation: Any, height: int, width: int) -> Mask:
    """Of an annotation: a list of polygons, or run lengths, compressed or not.

    Raises `ValueError`, with a reason that goes on after the annotation's name.
    """
    if isinstance(segmentation, Mapping):
        return runs(segmentation, height, width)
    if not isinstance(segmentation, Sequence) or isinstance(segmentation, str) or not segmentation:
        raise ValueError("has neither polygons nor run lengths")
    found = np.zeros((height, width), np.uint8)
    for outline in segmentation:
        found |= polygon(outline, height, width)
    return found


def polygon(outline: Sequence[float], height: int, width: int) -> Mask:
    """``outline``: x, y, x, y, …; a pixel is inside if its middle is (even-odd)."""
    if not isinstance(outline, Sequence) or len(outline) < 6 or len(outline) % 2:
        raise ValueError("has a polygon that is not three or more pairs of x and y")
    points = np.asarray(outline, np.float64).reshape(-1, 2)
    if not np.isfinite(points).all():
        raise ValueError("has a polygon with a number that is not finite")
    # Going along a row, every crossing of the outline toggles between outside and inside.
    crossings = np.zeros((height, width + 1), np.int64)
    for (x0, y0), (x1, y1) in zip(points, np.roll(points, -1, 0), strict=True):
        low, high = sorted((y0, y1))
        first = int(np.clip(np.ceil(low - 0.5), 0, height))
        last = int(np.clip(np.ceil(high - 0.5), 0, height))
        rows = np.arange(first, last)  # whose middles are in [low, high): none of a level edge
        if not len(rows):
            continue
        at = x0 + (rows + 0.5 - y0) * ((x1 - x0) / (y1 - y0))
        columns = np.clip(np.ceil(at - 0.5), 0, width).astype(np.int64)
        np.add.at(crossings, (rows, columns), 1)
    return (crossings.cumsum(1)[:, :width] % 2).astype(np.uint8)


def runs(segmentation: Mapping[str, Any], height: int, width: int) -> Mask:
    """``counts`` of zeros, ones, zeros, …, down the columns; as numbers or as COCO's string."""
    size, counts = segmentation.get("size"), segmentation.get("counts")
    if list(size or ()) != [height, width]:
        raise ValueError(f"has run lengths of size {size} for an image of {[height, width]}")
    lengths = _numbers(counts) if isinstance(counts, str) else counts
    if not isinstance(lengths, list) or any(length < 0 for length in lengths):
        raise ValueError("has run lengths that are no numbers of at least 0")
    if (total := sum(lengths)) != height * width:
        raise ValueError(f"has run lengths of {total} pixels for an image of {height * width}")
    found = np.repeat(np.arange(len(lengths), dtype=np.uint8) % 2, lengths)
    return np.ascontiguousarray(found.reshape(width, height).T)


def _numbers(text: str) -> list[int]:
    """Five bits a letter, the lowest first; from the fourth on, differences to the last but one."""
    found: list[int] = []
    value = shift = 0
    for letter in text:
        code = ord(letter) - 48
        if not 0 <= code < 64:
            raise ValueError(f"has run lengths with the letter {letter!r}")
        value |= (code & 31) << shift
        shift += 5
        if code & 32:  # more follow
            continue
        if code & 16:  # the sign
            value -= 1 << shift
        found.append(value + (found[-2] if len(found) > 2 else 0))
        value = shift = 0
    if shift:
        raise ValueError("has run lengths that end too early")
    return found
