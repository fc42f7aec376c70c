"""Fashion-MNIST: 60,000 and 10,000 pictures of clothes of 28 x 28 pixels."""

from pathlib import Path

from natgrad.lab.data import idx
from natgrad.lab.data.dataset import Split
from natgrad.lab.data.images import Images, Normalise
from natgrad.lab.data.sources import FASHION_MNIST

CLASSES = (
    "T-shirt/top",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)


def fashion_mnist(folder: Path | str | None = None) -> Split[Images]:
    """``images [n, 1, 28, 28]``, 60,000 to learn from and 10,000 to judge by.

    Arguments:
        folder: that has the files; ``None`` looks into ``NATGRAD_DATA``, the cache and
            ``/usr/share/datasets``.
    """
    return idx.labelled(FASHION_MNIST, folder, CLASSES, Normalise((0.2860,), (0.3530,)))
