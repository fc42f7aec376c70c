"""How well objects were found: COCO's average precision of boxes and of masks.

    AP = mean over classes and overlaps t of  1/101 Σ_r max {precision at a recall of at least r},
    t = .5, .55, … .95,  r = 0, .01, … 1

What is found is matched to what is there image by image, and lists of `Matches` can be added up
over batches and processes before `average_precision` sorts all of them by score.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

OVERLAPS = np.linspace(0.5, 0.95, 10)  # from which on something counts as found
RECALLS = np.linspace(0.0, 1.0, 101)
MOST = 100  # objects of one class that may be found in an image

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Matches:
    """What was found in one image, and what is there.

    Arguments:
        labels: ``[d]``, class of each finding, the best first.
        scores: ``[d]``, how sure it is.
        right: ``[10, d]``, whether it is right at each of the overlaps .5, .55, … .95.
        counts: ``[10, d]``, whether it counts; what is found in a crowd does not.
        truth: ``[g]``, class of each object there is, without crowds.
    """

    labels: npt.NDArray[np.int64]  # [d]
    scores: npt.NDArray[np.float64]  # [d]
    right: Flags  # [10, d]
    counts: Flags  # [10, d]: what is found in a crowd does not
    truth: npt.NDArray[np.int64]  # [g], without crowds


@dataclass(frozen=True)
class Precision:
    """Average precision, from 0 to 1.

    Arguments:
        mean: over all overlaps from .5 to .95.
        half: at an overlap of .5.
    """

    mean: float
    half: float


def box_matches(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> Matches:
    """Findings and objects of one image, matched by their boxes; of each class the best 100
    findings count.

    Arguments:
        found: ``labels [d]``, ``scores [d]`` and ``boxes [d, 4]`` (left, top, right, bottom), as
            torchvision's models give them for an image.
        truth: as `Instances` gives it: ``boxes [g, 4]``, ``labels [g]`` and ``iscrowd [g]``.
    """
    return _matches(found, truth, box_overlaps(found["boxes"], truth["boxes"], _crowds(truth)))


def mask_matches(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> Matches:
    """Findings and objects of one image, matched by their masks.

    Arguments:
        found: ``labels [d]``, ``scores [d]`` and ``masks [d, 1, h, w]``, the probability of every
            pixel, which belongs to the object from ½ on,, as torchvision's models give them for an
            image.
        truth: as `Instances` gives it: ``masks [g, h, w]``, ``labels [g]`` and ``iscrowd [g]``.
    """
    masks = found["masks"].flatten(1) >= 0.5
    return _matches(found, truth, mask_overlaps(masks, truth["masks"].flatten(1), _crowds(truth)))


def box_overlaps(found: Tensor, truth: Tensor, crowds: Flags) -> npt.NDArray[np.float64]:
    """``[d, 4]``, ``[g, 4]``, ``[g]`` -> intersection over union ``[d, g]``; with a crowd, over
    what was found."""
    a, b = (t.detach().cpu().double() for t in (found, truth))
    low = torch.maximum(a[:, None, :2], b[None, :, :2])
    high = torch.minimum(a[:, None, 2:], b[None, :, 2:])
    both = (high - low).clamp(min=0).prod(2)
    first, second = ((t[:, 2:] - t[:, :2]).prod(1) for t in (a, b))
    return _ratio(both, first, second, crowds)


def mask_overlaps(found: Tensor, truth: Tensor, crowds: Flags) -> npt.NDArray[np.float64]:
    """The same of pixels, ``[d, pixels]`` and ``[g, pixels]``"""
    # Numbers of pixels are exact in float32 below 2^24.
    a, b = (t.detach().cpu().float() for t in (found, truth))
    return _ratio((a @ b.mT).double(), a.sum(1).double(), b.sum(1).double(), crowds)


def average_precision(images: Sequence[Matches]) -> Precision:
    """Of all images together; 0 where there is no object at all.

    Arguments:
        images: what `box_matches` or `mask_matches` gave for each of them, of all batches and
            processes.
    """
    truth = np.concatenate([one.truth for one in images]) if images else np.zeros(0, np.int64)
    if not len(truth):
        return Precision(0.0, 0.0)
    labels = np.concatenate([one.labels for one in images])
    scores = np.concatenate([one.scores for one in images])
    right = np.concatenate([one.right for one in images], 1)
    counts = np.concatenate([one.counts for one in images], 1)
    found = np.array(
        [
            _precisions(scores[mine], right[:, mine], counts[:, mine], int((truth == label).sum()))
            for label in np.unique(truth)
            for mine in [labels == label]
        ]
    )
    return Precision(float(found.mean()), float(found[:, 0].mean()))


def _precisions(
    scores: npt.NDArray[np.float64], right: Flags, counts: Flags, objects: int
) -> list[float]:
    """Of one class, at each overlap."""
    order = np.argsort(-scores, kind="stable")
    found = []
    for hit, counted in zip(right[:, order], counts[:, order], strict=True):
        hits = np.cumsum(hit[counted])
        precision = hits / np.arange(1, len(hits) + 1)
        # At least as high as at any higher recall.
        precision = np.maximum.accumulate(precision[::-1])[::-1]
        places = np.searchsorted(hits / objects, RECALLS)
        found.append(float(np.append(precision, 0.0)[places].mean()))
    return found


def _matches(
    found: Mapping[str, Tensor], truth: Mapping[str, Tensor], overlaps: npt.NDArray[np.float64]
) -> Matches:
    labels = found["labels"].detach().cpu().numpy()
    scores = found["scores"].detach().cpu().double().numpy()
    there, crowds = truth["labels"].detach().cpu().numpy(), _crowds(truth)
    order = _best(labels, scores)
    shape = (len(OVERLAPS), len(order))
    right, counts = np.zeros(shape, bool), np.ones(shape, bool)
    for level, least in enumerate(OVERLAPS):
        free = np.ones(len(there), bool)
        for place, row in enumerate(order):
            possible = (there == labels[row]) & (overlaps[row] >= least)
            objects = possible & free & ~crowds
            if objects.any():
                best = np.where(objects, overlaps[row], -1.0)
                free[np.flatnonzero(best == best.max())[-1]] = False  # the last, as COCO does
                right[level, place] = True
            elif (possible & crowds).any():
                counts[level, place] = False
    return Matches(
        labels[order].astype(np.int64),
        scores[order],
        right,
        counts,
        there[~crowds].astype(np.int64),
    )


def _best(labels: npt.NDArray[np.int64], scores: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The best first, and at most so many of a class."""
    order = np.argsort(-scores, kind="stable")
    kept = [
        row for label in np.unique(labels) for row in order[labels[order] == label][:MOST].tolist()
    ]
    return np.array(sorted(kept, key=lambda row: -scores[row]), np.int64)


def _crowds(truth: Mapping[str, Tensor]) -> Flags:
    crowds: Flags = truth["iscrowd"].detach().cpu().numpy() > 0
    return crowds


def _ratio(both: Tensor, found: Tensor, truth: Tensor, crowds: Flags) -> npt.NDArray[np.float64]:
    union = found[:, None] + truth[None, :] - both
    union = torch.where(torch.from_numpy(crowds), found[:, None].expand_as(union), union)
    ratio: npt.NDArray[np.float64] = (both / union.clamp(min=1e-12)).numpy()
    return ratio
