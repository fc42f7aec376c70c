"""A folder for each class, as ImageNet is laid out: ``train/n01440764/*.JPEG``, ``val/…``."""

from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from natgrad.data import pictures, places
from natgrad.data.chances import Chances
from natgrad.data.crops import Crop, Squeeze
from natgrad.data.images import Normalise
from natgrad.data.rows import Rows, Split
from natgrad.errors import DataError

# The channel means of ImageNet; O11 divides by no deviation.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
O11 = Normalise(MEAN, (1.0, 1.0, 1.0))
USUAL = Normalise(MEAN, DEVIATION)
_TESTS = ("val", "valid", "validation", "test")


class ImageFolder(Rows):
    """Images of one folder; ``classes`` are the names of the folders in it unless given."""

    def __init__(
        self,
        folder: Path,
        crop: Crop,
        normalise: Normalise,
        *,
        training: bool,
        classes: Sequence[str] | None = None,
    ) -> None:
        found = sorted(path.name for path in folder.iterdir() if path.is_dir())
        self.classes = tuple(found if classes is None else classes)
        self.crop, self.normalise, self.training = crop, normalise, training
        if not found:
            raise DataError(f"{folder} has no folder in it: make one for each class.")
        if others := set(found) - set(self.classes):
            raise DataError(
                f"{folder / min(others)} is a class that there is nothing to learn about: rename "
                "it, or remove it."
            )
        of = {name: pictures.within(folder / name) for name in found}
        self.files = [file for name in found for file in of[name]]
        number = {name: i for i, name in enumerate(self.classes)}
        self.labels = torch.tensor([number[name] for name in found for _ in of[name]])
        if not self.files:
            raise DataError(
                f"{folder} has classes but no images in them: put files there that end in "
                f"{', '.join(pictures.ENDINGS)}."
            )
        self.chances = crop.chances if training else 0

    def __len__(self) -> int:
        return len(self.files)

    def take(self, rows: Sequence[int], chances: Chances) -> tuple[Tensor, Tensor]:
        """``[n, 3, size, size]``, ``[n]``"""
        images = [self._cut(row, drawn) for row, drawn in zip(rows, chances, strict=True)]
        return self.normalise(torch.stack(images)), self.labels[torch.as_tensor(rows)]

    def normalised(self, by: Normalise) -> "ImageFolder":
        """The same images with another normalisation."""
        found = copy(self)
        found.normalise = by
        return found

    def _cut(self, row: int, chances: Any) -> Tensor:
        image = pictures.opened(self.files[row], "RGB")
        crop = self.crop
        return pictures.tensor(crop.drawn(image, chances) if self.training else crop.middle(image))


def image_folder(
    folder: Path | str,
    crop: Crop | None = None,
    normalise: Normalise = O11,
) -> Split[ImageFolder]:
    """``folder``, as it is named or in one of the places, with ``train`` and ``val`` in it.

    By default images are prepared as in O11: ``Squeeze()``, and the mean of the channels
    subtracted. `mean_image` gives the mean image for a `Normalise` of its own.
    """
    crop = Squeeze() if crop is None else crop
    home = places.folder(folder, "images")
    if not (home / "train").is_dir():
        raise DataError(f"{home} has no folder 'train': put a folder for each class into it.")
    for name in _TESTS:
        if (home / name).is_dir():
            break
    else:
        raise DataError(
            f"{home} has 'train' but none of {', '.join(_TESTS)}: put images to judge by there."
        )
    train = ImageFolder(home / "train", crop, normalise, training=True)
    judged = ImageFolder(home / name, crop, normalise, training=False, classes=train.classes)
    return Split(train, judged)
