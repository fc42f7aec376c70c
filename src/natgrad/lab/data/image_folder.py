"""A folder for each class, as ImageNet is laid out: ``train/n01440764/*.JPEG``, ``val/…``."""

from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from natgrad.errors import DataError
from natgrad.lab.data import image_files, locations
from natgrad.lab.data.crops import Crop, Squeeze
from natgrad.lab.data.dataset import Rows, Split
from natgrad.lab.data.images import Normalise
from natgrad.lab.data.random_numbers import Chances

# The channel means of ImageNet; Osawa 2019 (sec. 4.1) divides by no deviation.
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
OSAWA_2019 = Normalise(MEAN, (1.0, 1.0, 1.0))
USUAL = Normalise(MEAN, DEVIATION)
_TESTS = ("val", "valid", "validation", "test")


class ImageFolder(Rows):
    """Images in a folder for each class; batches are ``[n, 3, size, size]`` and labels ``[n]``.

    Arguments:
        folder: with a folder of images for each class.
        crop: what is cut out of an image: `Squeeze` or `Zoom`.
        normalise: what is subtracted and divided by.
        training: whether crops are random; otherwise from the middle.
        classes: names of the classes in the order of their labels, which the folders must be among;
            ``None`` takes the folders in alphabetical order.
    """

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
        of = {name: image_files.within(folder / name) for name in found}
        self.files = [file for name in found for file in of[name]]
        number = {name: i for i, name in enumerate(self.classes)}
        self.labels = torch.tensor([number[name] for name in found for _ in of[name]])
        if not self.files:
            raise DataError(
                f"{folder} has classes but no images in them: put files there that end in "
                f"{', '.join(image_files.ENDINGS)}."
            )
        self.chances = crop.chances if training else 0

    def __len__(self) -> int:
        return len(self.files)

    def take(self, rows: Sequence[int], chances: Chances) -> tuple[Tensor, Tensor]:
        """``[n, 3, size, size]``, ``[n]``"""
        images = [self._cut(row, drawn) for row, drawn in zip(rows, chances, strict=True)]
        return self.normalise(torch.stack(images)), self.labels[torch.as_tensor(rows)]

    def normalised(self, by: Normalise) -> "ImageFolder":
        """The same images with another normalisation.

        Arguments:
            by: what is subtracted and divided by instead.
        """
        found = copy(self)
        found.normalise = by
        return found

    def _cut(self, row: int, chances: Any) -> Tensor:
        image = image_files.opened(self.files[row], "RGB")
        crop = self.crop
        return image_files.tensor(
            crop.drawn(image, chances) if self.training else crop.middle(image)
        )


def image_folder(
    folder: Path | str,
    crop: Crop | None = None,
    normalise: Normalise = OSAWA_2019,
) -> Split[ImageFolder]:
    """Images to learn from, with random crops, and to judge by, with crops from the middle.

    Arguments:
        folder: with ``train`` and one of ``val``, ``valid``, ``validation`` and ``test`` in it,
            each with a folder for each class; as named or below one of the places where data are
            looked for.
        crop: what is cut out of an image: `Squeeze` or `Zoom`; ``None`` is ``Squeeze()``, as in
            Osawa 2019.
        normalise: what is subtracted and divided by: by default the mean of the channels and 1, as
            there. `mean_image` gives a mean image for a `Normalise` of its own.
    """
    crop = Squeeze() if crop is None else crop
    home = locations.folder(folder, "images")
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
