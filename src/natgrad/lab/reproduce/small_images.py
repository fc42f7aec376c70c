"""Fashion-MNIST at 14 x 14 pixels, for items that train many small networks: a path to its function
stands in settings as ``data``."""

from functools import cache

import torch.nn.functional as F

from natgrad.lab import data
from natgrad.lab.data.dataset import Split
from natgrad.lab.data.images import Images

FASHION = f"{__name__}:fashion"


@cache
def fashion() -> Split[Images]:
    """Pixels averaged over 2 x 2, as bytes again; the same objects at every call."""
    train, test = (_halved(part) for part in data.fashion_mnist())
    return Split(train, test)


def _halved(part: Images) -> Images:
    images = F.avg_pool2d(part.images.float(), 2).round().to(part.images.dtype)
    return Images(images, part.labels, part.classes, part.normalise)
