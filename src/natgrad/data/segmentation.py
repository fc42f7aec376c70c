"""Images and masks in two folders, paired by name: a class for every pixel (K10)."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from natgrad.data import pictures, places
from natgrad.data.chances import Chances
from natgrad.data.images import Normalise
from natgrad.data.rows import IGNORED, Rows, Split
from natgrad.data.sources import MEMBRANE
from natgrad.errors import DataError, SettingError

_GRAY = Normalise((0.5,), (0.25,))
_COLOUR = Normalise((0.5,) * 3, (0.25,) * 3)


class Segmentation(Rows):
    """``values``: the mask's value for class 0, 1, …; ``ignore``: that of pixels without a class.

    ``size``: a square of that many pixels is cut out, at random and in one of its eight symmetries
    in ``training`` and from the middle otherwise; ``None`` takes the whole image.
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
        image = pictures.tensor(pictures.opened(image_file, "RGB" if self.colour else "L"))
        drawn = pictures.opened(mask_file)
        # A palette's indices are the classes, its colours are for the eye.
        mask = pictures.tensor(drawn if drawn.mode in ("L", "P") else drawn.convert("L"))[0]
        if mask.shape != image.shape[1:]:
            sizes = [" x ".join(map(str, t.shape[-2:])) for t in (mask, image)]
            raise places.spoilt(
                mask_file, f"is a mask of {sizes[0]} pixels for an image of {sizes[1]}"
            )
        classes = self._class_of[mask.long()]
        if bool((strange := classes == -1).any()):
            raise places.spoilt(
                mask_file, f"has the value {int(mask[strange][0])}, which stands for no class"
            )
        if self.size is not None and self.size > min(mask.shape):
            raise places.spoilt(
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
    """``folder`` has the folders ``images`` and ``masks``; the last share ``test`` is kept apart.

    Images are read as ``colour`` or gray, masks as they are: gray values, or a palette's indices.
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
    home = places.folder(folder, "images and masks")
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
    """24 and 6 images ``[1, 512, 512]`` of cells (class 1) and their membranes (class 0)."""
    found = places.find(MEMBRANE, folder)
    normalise = Normalise((0.4908,), (0.1708,))
    return segmentation_folder(found["image"].parent, size=size, normalise=normalise)


def _pairs(images: Path, masks: Path) -> list[tuple[Path, Path]]:
    for home in (images, masks):
        if not home.is_dir():
            raise DataError(f"There is no folder {home}: put images and their masks there.")
    of = {path.stem: path for path in pictures.within(masks)}
    files = pictures.within(images)
    for file in files:
        if file.stem not in of:
            raise DataError(
                f"{file} has no mask of that name in {masks}: put one there, or remove the image."
            )
    return [(file, of[file.stem]) for file in files]
