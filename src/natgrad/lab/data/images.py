"""Small labelled images in memory: bytes as they were read, made real numbers batch by batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from natgrad.errors import SettingError
from natgrad.lab.data.dataset import Rows
from natgrad.lab.data.random_numbers import Chances


@dataclass(frozen=True, eq=False)
class Normalise:
    """``(x / full - mean) / deviation``.

    Arguments:
        mean: a number for each channel, or an image ``[c, h, w]`` (Osawa 2019, sec. 4.1), in units
            of ``full``.
        deviation: a number for each channel, likewise.
        full: the largest value of a pixel, which becomes 1.
    """

    mean: Tensor | Sequence[float]
    deviation: Tensor | Sequence[float]
    full: float = 255.0

    def __call__(self, images: Tensor) -> Tensor:
        """``[n, c, h, w]``, of any dtype -> the same in float32."""
        mean, deviation = (_spread(numbers) for numbers in (self.mean, self.deviation))
        if len(mean) != images.shape[1]:
            raise SettingError(
                f"The mean is of {len(mean)} channels but the images have {images.shape[1]}: pass "
                "a Normalise with a number for each channel."
            )
        return images.float().div_(self.full).sub_(mean).div_(deviation)

    def unit(self) -> "Normalise":
        """From 0 to 1, and nothing else."""
        channels = len(self.mean)
        return Normalise((0.0,) * channels, (1.0,) * channels, self.full)


def _spread(numbers: Tensor | Sequence[float]) -> Tensor:
    found = torch.as_tensor(numbers, dtype=torch.float32)
    return found if found.ndim == 3 else found.view(-1, 1, 1)


@dataclass(frozen=True)
class Shift:
    """A random crop, mirrored: what residual networks are trained with on CIFAR-10.

    Arguments:
        padding: zeros around the image before it is cut to its size again, in pixels.
        flip: whether every other image is mirrored.
    """

    padding: int = 4
    flip: bool = True
    chances = 3

    def __call__(self, images: Tensor, chances: Chances) -> Tensor:
        """``[n, c, h, w]``, ``[n, 3]`` -> ``[n, c, h, w]``."""
        count, _, height, width = images.shape
        around = F.pad(images, (self.padding,) * 4)
        drawn = torch.from_numpy(chances)
        corner = (drawn[:, :2] * (2 * self.padding + 1)).long()
        ys = corner[:, :1] + torch.arange(height)  # [n, h]
        xs = corner[:, 1:] + torch.arange(width)
        if self.flip:
            xs = torch.where(drawn[:, 2:] < 0.5, xs.flip(1), xs)
        samples = torch.arange(count)
        cut = around[samples[:, None, None], :, ys[:, :, None], xs[:, None, :]]  # [n, h, w, c]
        return cut.permute(0, 3, 1, 2).contiguous()


@dataclass(frozen=True, eq=False)
class Images(Rows):
    """Labelled images in memory; batches are ``(float32 [n, c, h, w], int64 [n])``.

    Arguments:
        images: ``[n, c, h, w]``, bytes.
        labels: ``[n]``, int64.
        classes: their names, in the order of the labels.
        normalise: makes real numbers of the bytes.
        augment: random crops of each batch; ``None`` leaves images as they are.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    normalise: Normalise
    augment: Shift | None = None

    @property
    def chances(self) -> int:  # type: ignore[override]
        return 0 if self.augment is None else self.augment.chances

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Sequence[int], chances: Chances) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(rows)
        images = self.images[chosen]
        if self.augment is not None:
            images = self.augment(images, chances)
        return self.normalise(images), self.labels[chosen]

    def tensors(self) -> tuple[Tensor, Tensor]:
        """All of it as one batch, without augmentation."""
        return self.normalise(self.images), self.labels

    def augmented(self, by: Shift | None = None) -> "Images":
        """The same with random crops and mirroring.

        Arguments:
            by: how; ``None`` is ``Shift()``.
        """
        return replace(self, augment=by or Shift())

    def unit(self) -> "Images":
        """The same with values from 0 to 1, as an autoencoder's targets should be."""
        return replace(self, normalise=self.normalise.unit())
