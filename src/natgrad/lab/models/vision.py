"""torchvision where it is needed, with what its compiled part lacks where that cannot be loaded.

A wheel of torchvision that was built for another torch (one with CUDA, say) cannot load its own
operators. Two of them are enough for Mask R-CNN, and both are short in torch: non-maximum
suppression, and `roi_align`, a mean of bilinear samples, which is separable,

    out[k] = Y[k] x[image of k] X[k]^T,    Y[k, p, i] = mean over samples y of p of (1 - |y - i|)_+
"""

from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from natgrad.errors import SettingError, first_line


@cache
def torchvision() -> Any:
    """The library, or a sentence. One whose own operators are there is left as it is."""
    try:
        found = _imported()
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torchvision":
            raise SettingError(
                "Mask R-CNN needs torchvision, which is not installed: pip install "
                "'natgrad[vision]'."
            ) from None
        raise SettingError(
            f"torchvision cannot be imported ({first_line(error)}): install the version that was "
            "made for this torch."
        ) from error
    if not import_module("torchvision.extension")._has_ops():
        # Each of them asks first whether all compiled operators are there.
        boxes: Any = import_module("torchvision.ops.boxes")
        regions: Any = import_module("torchvision.ops.roi_align")
        boxes._assert_has_ops, regions._roi_align = (lambda: None), roi_align
    return found


def _imported() -> Any:
    try:
        return import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise ImportError(first_line(error)) from error
    library = torch.library.Library("torchvision", "FRAGMENT")
    _KEPT.append(library)
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.impl("nms", nms, "CompositeExplicitAutograd")
    return import_module("torchvision")


_KEPT: list[torch.library.Library] = []  # an operator goes with the object that defined it


def nms(boxes: Tensor, scores: Tensor, most: float) -> Tensor:
    """``boxes [n, 4]`` (left, top, right, bottom), ``scores [n]`` -> the numbers of those that stay
    when all that overlap by more than ``most`` with a better one are gone, the best first."""
    order = scores.argsort(descending=True, stable=True)
    sorted_boxes = boxes[order]
    stays = np.ones(len(order), bool)
    for first in range(0, len(order), _AT_ONCE):
        rows, rest = sorted_boxes[first : first + _AT_ONCE], sorted_boxes[first:]
        low = torch.maximum(rows[:, None, :2], rest[:, :2])
        high = torch.minimum(rows[:, None, 2:], rest[:, 2:])
        both = (high - low).clamp(min=0).prod(2)
        area, others = ((part[:, 2:] - part[:, :2]).prod(1) for part in (rows, rest))
        clear = (both <= most * (area[:, None] + others - both)).cpu().numpy()
        # One after the other: what is gone suppresses nothing itself.
        for i, row in enumerate(clear):
            if stays[first + i]:
                stays[first + i + 1 :] &= row[i + 1 :]
    return order[torch.from_numpy(stays).to(order.device)]


_AT_ONCE = 1024  # boxes whose overlaps with all others are computed together


def roi_align(
    x: Tensor,
    regions: Tensor,
    scale: float,
    height: int,
    width: int,
    samples: int,
    aligned: bool,
) -> Tensor:
    """``x [n, c, h, w]``, ``regions [k, 5]`` (image, left, top, right, bottom) -> ``[k, c, height,
    width]``: the means of ``samples`` by ``samples`` bilinear samples in every cell of a region, or
    of about one a pixel if ``samples`` is 0 or less. ``scale`` is that of ``x`` to the regions.
    """
    exact = torch.promote_types(x.dtype, torch.float32)  # also under autocast
    corners = regions[:, 1:].to(exact) * scale - (0.5 if aligned else 0.0)
    first, extent = corners[:, :2], corners[:, 2:] - corners[:, :2]
    if not aligned:
        extent = extent.clamp(min=1.0)
    columns = _weights(first[:, 0], extent[:, 0], width, samples, x.shape[3])
    rows = _weights(first[:, 1], extent[:, 1], height, samples, x.shape[2])
    out = x.new_zeros(len(regions), x.shape[1], height, width, dtype=exact)
    images = regions[:, 0].long()
    with torch.autocast(x.device.type, enabled=False):
        for image in images.unique().tolist():
            here = (images == image).nonzero()[:, 0]
            half = torch.einsum("kph,chw->kcpw", rows[here], x[image].to(exact))
            out = out.index_copy(0, here, half @ columns[here].mT.unsqueeze(1))
    return out.to(x.dtype)


def _weights(first: Tensor, extent: Tensor, cells: int, samples: int, size: int) -> Tensor:
    """Of ``size`` pixels along one axis in every cell of regions that begin at ``first [k]`` and
    are ``extent [k]`` long: ``[k, cells, size]``"""
    cell = extent / cells
    count = torch.full_like(cell, samples) if samples > 0 else cell.ceil().clamp(min=1)
    begin = first[:, None] + torch.arange(cells).to(cell) * cell[:, None]
    pixels = torch.arange(size).to(cell)
    total = cell.new_zeros(len(cell), cells, size)
    for i in range(int(count.max()) if len(count) else 0):
        at = begin + ((i + 0.5) * cell / count)[:, None]
        # What is more than a pixel outside counts as 0, what is less as the pixel at the edge.
        inside = (at >= -1) & (at <= size) & (i < count)[:, None]
        distance = (at.clamp(0, size - 1).unsqueeze(2) - pixels).abs()
        total += (1 - distance).clamp(min=0) * inside.unsqueeze(2)
    return total / count[:, None, None]
