"""Random erasing: a rectangle of ``H_e = √(S r)`` by ``W_e = √(S / r)`` pixels becomes zero."""

import numpy as np
import torch
from torch import Tensor

from natgrad.checks import Range, number
from natgrad.errors import SettingError
from natgrad.lab.schemes.beta_draws import check_generator, numpy_generator

_PROBABILITY = Range(low=0, high=1)
_PART = Range(low=0, high=1, open_low=True)


class RandomErasing:
    """Erases one rectangle of each image with a ``probability`` (Osawa 2019, sec. 4.1).

    Its area ``S`` is a uniform part of the image's, its aspect ``r`` is uniform, height and width
    are swapped half of the time, and it lies anywhere within the image. What does not fit into a
    long image is cut to its side.

    Arguments:
        probability: with which an image is erased from, from 0 to 1.
        area: smallest and largest ``S``, as parts of the image's area, above 0 and at most 1.
        aspect: smallest and largest ``r``, above 0 and at most 1.
        generator: of the random numbers, on the CPU; ``None`` is torch's own.
    """

    def __init__(
        self,
        probability: float = 0.5,
        area: tuple[float, float] = (0.02, 0.25),
        aspect: tuple[float, float] = (0.3, 1.0),
        generator: torch.Generator | None = None,
    ) -> None:
        self.probability = number(probability, "RandomErasing.probability", _PROBABILITY)
        self.area = _range(area, "RandomErasing.area")
        self.aspect = _range(aspect, "RandomErasing.aspect")
        check_generator(generator, "RandomErasing")
        self.generator = generator

    def __call__(self, images: Tensor) -> Tensor:
        """Images ``[n, channels, H, W]``, or one ``[channels, H, W]``; returns a new tensor."""
        if images.ndim not in (3, 4):
            raise SettingError(
                f"images are of shape {list(images.shape)} but must be [n, channels, H, W], or "
                "[channels, H, W] for one of them: reshape them."
            )
        height, width = images.shape[-2:]
        n = len(images) if images.ndim == 4 else 1
        top, bottom, left, right = (
            torch.from_numpy(side).to(images.device).reshape(-1, 1, 1, 1)
            for side in self.rectangles(n, height, width)
        )
        rows = torch.arange(height, device=images.device).reshape(-1, 1)
        columns = torch.arange(width, device=images.device)
        erased = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
        return images.masked_fill(erased if images.ndim == 4 else erased[0], 0)

    def rectangles(self, n: int, height: int, width: int) -> np.ndarray:
        """``[4, n]`` whole numbers: top, bottom, left and right, all 0 where nothing is erased.

        Arguments:
            n: number of images.
            height: of the images, in pixels.
            width: of the images, in pixels.
        """
        draws = numpy_generator(self.generator).random((6, n))
        erases, swaps = draws[0] < self.probability, draws[1] < 0.5
        area = height * width * (self.area[0] + draws[2] * (self.area[1] - self.area[0]))
        aspect = self.aspect[0] + draws[3] * (self.aspect[1] - self.aspect[0])
        tall, wide = np.sqrt(area * aspect), np.sqrt(area / aspect)
        tall, wide = np.where(swaps, wide, tall), np.where(swaps, tall, wide)
        tall = np.clip(np.rint(tall), 1, height)
        wide = np.clip(np.rint(wide), 1, width)
        top = np.floor(draws[4] * (height - tall + 1))
        left = np.floor(draws[5] * (width - wide + 1))
        sides: np.ndarray = erases * np.stack([top, top + tall, left, left + wide])
        return sides.astype(np.int64)


def _range(given: tuple[float, float], name: str) -> tuple[float, float]:
    try:
        low, high = given
    except (TypeError, ValueError):
        raise SettingError(
            f"{name} is {given!r} but must be two numbers: pass the smallest and the largest."
        ) from None
    number(low, f"The smallest {name}", _PART)
    number(high, f"The largest {name}", _PART)
    if low > high:
        raise SettingError(
            f"{name} is {given!r} but must not fall: pass the smaller of the two first."
        )
    return low, high
