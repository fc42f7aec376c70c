"""A square out of a photograph: one at random to learn from, the middle one to judge by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np

from natgrad.errors import SettingError

if TYPE_CHECKING:
    import numpy.typing as npt
    from PIL.Image import Image

# Pillow's numbers, so that it need not be there to import this.
_BILINEAR, _MIRROR = 2, 0


class Crop(Protocol):
    """``chances``: how many random numbers in [0, 1) a crop takes."""

    chances: ClassVar[int]

    def drawn(self, image: Image, chances: npt.NDArray[np.float64]) -> Image: ...

    def middle(self, image: Image) -> Image: ...


@dataclass(frozen=True)
class Squeeze:
    """Resized to a square whatever its aspect, then a random crop, mirrored every other time (Osawa
    2019, sec. 4.1).

    Arguments:
        side: pixels of the square that the image is resized to.
        size: pixels of the square that is cut out, at most ``side``.
    """

    side: int = 256
    size: int = 224
    chances: ClassVar[int] = 3

    def __post_init__(self) -> None:
        _check(self.side, self.size)

    def drawn(self, image: Image, chances: npt.NDArray[np.float64]) -> Image:
        """A random crop, to learn from.

        Arguments:
            image: of Pillow.
            chances: ``[3]``, uniform in [0, 1): left, top, and whether it is mirrored.
        """
        room = self.side - self.size + 1
        left, top = int(chances[0] * room), int(chances[1] * room)
        cut = _cut(self._resized(image), left, top, self.size)
        return cut.transpose(_MIRROR) if chances[2] < 0.5 else cut  # type: ignore[arg-type]

    def middle(self, image: Image) -> Image:
        """The crop in the middle, to judge by.

        Arguments:
            image: of Pillow.
        """
        start = (self.side - self.size) // 2
        return _cut(self._resized(image), start, start, self.size)

    def corner(self, image: Image) -> Image:
        """The crop at the upper left, of which the mean image is made.

        Arguments:
            image: of Pillow.
        """
        return _cut(self._resized(image), 0, 0, self.size)

    def _resized(self, image: Image) -> Image:
        return image.resize((self.side, self.side), _BILINEAR)


@dataclass(frozen=True)
class Zoom:
    """A random share of the area with a random aspect, resized to a square and mirrored every other
    time; to judge by, the middle of the image.

    The aspect is uniform in its logarithm. Of ten draws the first that lies in the image is taken,
    else its middle, as is usual for ResNet-50 on ImageNet (Pauloski 2022).

    Arguments:
        size: pixels of the square that comes out.
        side: pixels of the shorter side of the image out of whose middle is cut to judge by, at
            least ``size``.
        area: smallest and largest share of the image's area, above 0 and at most 1.
        aspect: smallest and largest width over height, above 0.
    """

    size: int = 224
    side: int = 256
    area: tuple[float, float] = (0.08, 1.0)
    aspect: tuple[float, float] = (3 / 4, 4 / 3)
    chances: ClassVar[int] = 23

    def __post_init__(self) -> None:
        _check(self.side, self.size)
        for name, (low, high) in (("area", self.area), ("aspect", self.aspect)):
            if not 0 < low <= high or (name == "area" and high > 1):
                most = "at most 1" if name == "area" else "finite"
                raise SettingError(
                    f"{name} is {(low, high)} but must be two numbers above 0, in their order and "
                    f"{most}: pass such a pair."
                )

    def drawn(self, image: Image, chances: npt.NDArray[np.float64]) -> Image:
        """A random crop, to learn from.

        Arguments:
            image: of Pillow.
            chances: ``[23]``, uniform in [0, 1): left, top, whether it is mirrored, and ten draws
                of area and aspect.
        """
        left, top, width, height = self.box(image.size, chances)
        cut = image.resize(
            (self.size, self.size), _BILINEAR, (left, top, left + width, top + height)
        )
        return cut.transpose(_MIRROR) if chances[2] < 0.5 else cut  # type: ignore[arg-type]

    def box(
        self, size: tuple[int, int], chances: npt.NDArray[np.float64]
    ) -> tuple[int, int, int, int]:
        """Left, top, width and height of what is cut out.

        Arguments:
            size: width and height of the image.
            chances: ``[23]``, uniform in [0, 1): left, top, whether it is mirrored, and ten draws
                of area and aspect.
        """
        full_width, full_height = size
        logs = [math.log(bound) for bound in self.aspect]
        for first, second in chances[3:].reshape(-1, 2):
            share = self.area[0] + first * (self.area[1] - self.area[0])
            aspect = math.exp(logs[0] + second * (logs[1] - logs[0]))
            area = share * full_width * full_height
            width, height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < width <= full_width and 0 < height <= full_height:
                break
        else:
            width = min(full_width, round(full_height * self.aspect[1]))
            height = min(full_height, round(full_width / self.aspect[0]))
            return (full_width - width) // 2, (full_height - height) // 2, width, height
        left = int(chances[0] * (full_width - width + 1))
        top = int(chances[1] * (full_height - height + 1))
        return left, top, width, height

    def middle(self, image: Image) -> Image:
        """The crop in the middle, to judge by.

        Arguments:
            image: of Pillow.
        """
        scale = self.side / min(image.size)
        width, height = (max(self.side, round(length * scale)) for length in image.size)
        resized = image.resize((width, height), _BILINEAR)
        return _cut(resized, (width - self.size) // 2, (height - self.size) // 2, self.size)


def _cut(image: Image, left: int, top: int, size: int) -> Image:
    return image.crop((left, top, left + size, top + size))


def _check(side: int, size: int) -> None:
    if not 1 <= size <= side:
        raise SettingError(
            f"A crop of {size} out of images of {side} pixels cannot be made: pass a size from 1 "
            f"to the side."
        )
