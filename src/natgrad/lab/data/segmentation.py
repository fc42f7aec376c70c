"""Images and masks in two folders, paired by name: a class for every pixel (KAISA)."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from natgrad.errors import DataError, SettingError
from natgrad.lab.data import image_files, locations
from natgrad.lab.data.dataset import IGNORED, Rows, Split
from natgrad.lab.data.images import Normalise
from natgrad.lab.data.random_numbers import Chances
from natgrad.lab.data.sources import MEMBRANE

_GRAY = Normalise((0.5,), (0.25,))
_COLOUR = Normalise((0.5,) * 3, (0.25,) * 3)


class Segmentation(Rows):
    """Images with a class for every pixel; batches are ``[n, c, h, w]`` and ``[n, h, w]``.

    Arguments:
        pairs: the files of each image and of its mask.
        size: pixels of a square that is cut out; ``None`` takes the whole image, and then those of
            a batch must be of one size.
        values: the mask's value for class 0, 1, …, from 0 to 255.
        ignore: value of pixels without a class, whose target is -100; ``None`` if there are none.
            Values that are neither raise.
        normalise: what is subtracted and divided by; with three channels images are read in colour,
            otherwise gray.
        training: whether the square is cut at random and in one of its eight symmetries; otherwise
            from the middle.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[Path, Path]],
        *,
        size: int | None,
        values: Sequence[int],
        ignore: int | None,
        normalise: Normalise,
        training: bool,
    ) -> None:
        self.pairs, self.size, self.training = tuple(pairs), size, training
        self.normalise, self.colour = normalise, len(normalise.mean) == 3
        self.classes = len(values)
        table = torch.full((256,), -1)  # -1: a value that has no meaning
        table[list(values)] = torch.arange(len(values))
        if ignore is not None:
            table[ignore] = IGNORED
        self._class_of = table
        self.chances = 3 if training else 0

    def __len__(self) -> int:
        return len(self.pairs)

    def take(self, rows: Sequence[int], chances: Chances) -> tuple[Tensor, Tensor]:
        """``[n, c, h, w]`` in float32, ``[n, h, w]`` in int64"""
        images: list[Tensor] = []
        masks: list[Tensor] = []
        for row, drawn in zip(rows, chances, strict=True):
            image, mask = self._read(*self.pairs[row])
            both = torch.cat([image.long(), mask.unsqueeze(0)])
            both = self._drawn(both, drawn) if self.training else self._middle(both)
            if images and both.shape[1:] != masks[0].shape:
                raise DataError(
                    f"{self.pairs[row][0]} has another size than the others of its batch: pass a "
                    "size to cut out of all of them."
                )
            images.append(both[:-1])
            masks.append(both[-1])
        return self.normalise(torch.stack(images)), torch.stack(masks)

    def _read(self, image_file: Path, mask_file: Path) -> tuple[Tensor, Tensor]:
        image = image_files.tensor(image_files.opened(image_file, "RGB" if self.colour else "L"))
        drawn = image_files.opened(mask_file)
        # A palette's indices are the classes, its colours are for the eye.
        mask = image_files.tensor(drawn if drawn.mode in ("L", "P") else drawn.convert("L"))[0]
        if mask.shape != image.shape[1:]:
            sizes = [" x ".join(map(str, t.shape[-2:])) for t in (mask, image)]
            raise locations.spoilt(
                mask_file, f"is a mask of {sizes[0]} pixels for an image of {sizes[1]}"
            )
        classes = self._class_of[mask.long()]
        if bool((strange := classes == -1).any()):
            raise locations.spoilt(
                mask_file, f"has the value {int(mask[strange][0])}, which stands for no class"
            )
        if self.size is not None and self.size > min(mask.shape):
            raise locations.spoilt(
                image_file,
                f"is smaller than the {self.size} x {self.size} pixels to be cut out of it",
            )
        return image, classes

    def _drawn(self, both: Tensor, chances: Chances) -> Tensor:
        """``[c + 1, h, w]``"""
        if self.size is not None:
            room = [length - self.size + 1 for length in both.shape[1:]]
            top, left = (int(chance * r) for chance, r in zip(chances, room, strict=False))
            both = both[:, top : top + self.size, left : left + self.size]
        symmetry = int(chances[2] * 8)
        if both.shape[1] == both.shape[2]:
            both = both.rot90(symmetry // 2, (1, 2))
        elif symmetry // 2 % 2:  # a rectangle fits itself only upside down
            both = both.rot90(2, (1, 2))
        return both.flip(2) if symmetry % 2 else both

    def _middle(self, both: Tensor) -> Tensor:
        if self.size is None:
            return both
        top, left = ((length - self.size) // 2 for length in both.shape[1:])
        return both[:, top : top + self.size, left : left + self.size]


def segmentation_folder(
    folder: Path | str,
    *,
    images: str = "image",
    masks: str = "label",
    size: int | None = None,
    values: Sequence[int] = (0, 255),
    ignore: int | None = None,
    colour: bool = False,
    normalise: Normalise | None = None,
    test: float = 0.2,
) -> Split[Segmentation]:
    """Images and their masks, to learn from and to judge by.

    Arguments:
        folder: with the two folders in it; as named or below one of the places where data are
            looked for.
        images: name of the folder of images.
        masks: name of the folder of masks, which have the names of their images. They are read as
            they are: gray values, or a palette's indices.
        size: pixels of a square that is cut out; ``None`` takes the whole image.
        values: the mask's value for class 0, 1, …, from 0 to 255.
        ignore: value of pixels without a class; ``None`` if there are none.
        colour: whether images are read in colour; otherwise gray.
        normalise: what is subtracted and divided by; ``None`` is ½ and ¼ in units of white.
        test: share of the images, between 0 and 1, that is kept to judge by: the last ones by name.
    """
    if not 0 < test < 1:
        raise SettingError(
            f"test is {test} but must be in (0, 1): pass the share of images to judge by."
        )
    for value in (*values, *(() if ignore is None else (ignore,))):
        if not 0 <= value <= 255:
            raise SettingError(
                f"A mask's value is {value} but must be from 0 to 255: pass values of bytes."
            )
    home = locations.folder(folder, "images and masks")
    pairs = _pairs(home / images, home / masks)
    kept = max(1, round(len(pairs) * test))
    if kept >= len(pairs):
        raise DataError(
            f"{home / images} has {len(pairs)} images, of which {kept} would be kept to judge by: "
            "put more images there."
        )
    normalise = normalise or (_COLOUR if colour else _GRAY)
    train, judged = (
        Segmentation(
            part,
            size=size,
            values=values,
            ignore=ignore,
            normalise=normalise,
            training=training,
        )
        for part, training in ((pairs[:-kept], True), (pairs[-kept:], False))
    )
    return Split(train, judged)


def membrane(size: int | None = None, folder: Path | str | None = None) -> Split[Segmentation]:
    """24 and 6 images ``[1, 512, 512]`` of cells (class 1) and their membranes (class 0).

    Arguments:
        size: pixels of a square that is cut out; ``None`` takes the whole image.
        folder: that has the folders ``image`` and ``label``; ``None`` looks into ``NATGRAD_DATA``,
            the cache and ``/usr/share/datasets``.
    """
    found = locations.find(MEMBRANE, folder)
    normalise = Normalise((0.4908,), (0.1708,))
    return segmentation_folder(found["image"].parent, size=size, normalise=normalise)


def _pairs(images: Path, masks: Path) -> list[tuple[Path, Path]]:
    for home in (images, masks):
        if not home.is_dir():
            raise DataError(f"There is no folder {home}: put images and their masks there.")
    of = {path.stem: path for path in image_files.within(masks)}
    files = image_files.within(images)
    for file in files:
        if file.stem not in of:
            raise DataError(
                f"{file} has no mask of that name in {masks}: put one there, or remove the image."
            )
    return [(file, of[file.stem]) for file in files]
