"""1,797 handwritten digits of 8 x 8 pixels that scikit-learn brings along: no download at all."""

from importlib import import_module

import torch

from natgrad.errors import DataError
from natgrad.lab.data.dataset import Split
from natgrad.lab.data.images import Images, Normalise

TRAIN = 1437
NORMALISE = Normalise((0.3049,), (0.3758,), full=16.0)


def digits() -> Split[Images]:
    """``images [n, 1, 8, 8]``, 1,437 to learn from and 360 to judge by, the same in every run."""
    try:
        found = import_module("sklearn.datasets").load_digits()
    except ImportError:
        raise DataError(
            "The digits come with scikit-learn, which is not installed: pip install "
            "'natgrad[demo]'."
        ) from None
    images = torch.tensor(found.images, dtype=torch.uint8).unsqueeze(1)
    labels = torch.tensor(found.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    classes = tuple("0123456789")
    return Split(
        *(
            Images(images[rows], labels[rows], classes, NORMALISE)
            for rows in (order[:TRAIN], order[TRAIN:])
        )
    )
