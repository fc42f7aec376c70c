"""MNIST: 60,000 and 10,000 handwritten digits of 28 x 28 pixels."""

from pathlib import Path

from natgrad.lab.data import idx
from natgrad.lab.data.dataset import Split
from natgrad.lab.data.images import Images, Normalise
from natgrad.lab.data.sources import MNIST

CLASSES = tuple("0123456789")


def mnist(folder: Path | str | None = None) -> Split[Images]:
    """``images [n, 1, 28, 28]``, 60,000 to learn from and 10,000 to judge by.

    Arguments:
        folder: that has the files; ``None`` looks into ``NATGRAD_DATA``, the cache and
            ``/usr/share/datasets``.
    """
    return idx.labelled(MNIST, folder, CLASSES, Normalise((0.1307,), (0.3081,)))
