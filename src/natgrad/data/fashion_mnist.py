"""Fashion-MNIST: 60,000 and 10,000 pictures of clothes of 28 x 28 pixels."""

from pathlib import Path

from natgrad.data import idx
from natgrad.data.images import Images, Normalise
from natgrad.data.rows import Split
from natgrad.data.sources import FASHION_MNIST

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
    """``images [n, 1, 28, 28]``, from ``folder`` or where it is found."""
    return idx.labelled(FASHION_MNIST, folder, CLASSES, Normalise((0.2860,), (0.3530,)))
