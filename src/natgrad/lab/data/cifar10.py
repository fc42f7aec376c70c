"""CIFAR-10, the binary version: records of a label and 3 x 32 x 32 bytes (Pauloski 2022).

The Python version is a pickle, which can run code and is not read.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from natgrad.lab.data import files
from natgrad.lab.data.dataset import Split
from natgrad.lab.data.images import Images, Normalise
from natgrad.lab.data.locations import find, spoilt
from natgrad.lab.data.sources import CIFAR10

RECORDS = 10_000  # of a file
RECORD = 1 + 3 * 32 * 32  # bytes
CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
NORMALISE = Normalise((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


def cifar10(folder: Path | str | None = None) -> Split[Images]:
    """``images [n, 3, 32, 32]``, 50,000 to learn from and 10,000 to judge by.

    Arguments:
        folder: that has the files; ``None`` looks into ``NATGRAD_DATA``, the cache and
            ``/usr/share/datasets``.
    """
    found = find(CIFAR10, folder)
    *train, test = (found[name] for name in CIFAR10.files)
    return Split(_images(train), _images([test]))


def _images(paths: Sequence[Path]) -> Images:
    records = torch.cat([_records(path) for path in paths])
    images = records[:, 1:].reshape(-1, 3, 32, 32)
    return Images(images, records[:, 0].long(), CLASSES, NORMALISE)


def _records(path: Path) -> Tensor:
    """``[RECORDS, RECORD]``"""
    data = files.read(path, CIFAR10)
    wanted = RECORDS * RECORD
    if len(data) != wanted:
        how = "truncated" if len(data) < wanted else "too long"
        raise spoilt(path, f"is {how}: {len(data):,} of {wanted:,} bytes", CIFAR10)
    records = torch.frombuffer(data, dtype=torch.uint8).view(RECORDS, RECORD)
    if (largest := int(records[:, 0].max())) >= len(CLASSES):
        raise spoilt(path, f"is corrupt: it has the label {largest} of 10 classes", CIFAR10)
    return records
