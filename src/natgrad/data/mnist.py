"""MNIST: 60,000 and 10,000 handwritten digits of 28 x 28 pixels."""

from pathlib import Path

from natgrad.data import idx
from natgrad.data.images import Images, Normalise
from natgrad.data.rows import Split
from natgrad.data.sources import MNIST

CLASSES = tuple("0123456789")


def mnist(folder: Path | str | None = None) -> Split[Images]:
    """``images [n, 1, 28, 28]``, from ``folder`` or where it is found."""
    return idx.labelled(MNIST, folder, CLASSES, Normalise((0.1307,), (0.3081,)))
