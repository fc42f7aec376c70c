"""Image files by Pillow, which is an optional extra."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from natgrad.errors import DataError, first_line
from natgrad.lab.data.locations import spoilt

if TYPE_CHECKING:
    from PIL.Image import Image

ENDINGS = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


def opened(path: Path, mode: str | None = None) -> Image:
    """Decoded; ``mode`` is Pillow's, such as ``RGB``, and ``None`` leaves it as it is."""
    pillow = _pillow()
    try:
        with pillow.open(path) as image:
            image.load()
            found: Image = image if mode in (None, image.mode) else image.convert(mode)
            return found
    except FileNotFoundError as error:
        raise DataError(f"There is no image {path}: put it there, or leave it out.") from error
    # Pillow's decoders raise what they like about a broken file.
    except (OSError, SyntaxError, ValueError, EOFError, pillow.DecompressionBombError) as error:
        raise spoilt(path, f"is no image or is corrupt ({first_line(error)})") from error


def tensor(image: Image) -> Tensor:
    """Bytes ``[c, h, w]``"""
    found = torch.from_numpy(np.array(image, dtype=np.uint8))
    return found.unsqueeze(0) if found.ndim == 2 else found.permute(2, 0, 1)


def write(path: Path, pixels: npt.NDArray[np.uint8]) -> None:
    """Bytes ``[h, w, 3]``; the ending of ``path`` says how."""
    _pillow().fromarray(pixels).save(path)


def within(folder: Path) -> list[Path]:
    """Image files directly inside, in the order of their names, numbers by size."""
    found = [path for path in folder.iterdir() if path.suffix.lower() in ENDINGS]
    return sorted(found, key=lambda path: (list(_pieces(path.stem)), path.name))


def _pieces(name: str) -> Iterator[tuple[int, str]]:
    """'a10b' -> (0, 'a'), (10, ''), (0, 'b')"""
    piece = ""
    for letter in f"{name} ":
        if piece and (letter.isdecimal() != piece[-1].isdecimal() or letter == " "):
            yield (int(piece), "") if piece.isdecimal() else (0, piece)
            piece = ""
        piece += letter


def _pillow() -> Any:
    try:
        return import_module("PIL.Image")
    except ImportError:
        raise DataError(
            "Image files are read by Pillow, which is not installed: pip install 'natgrad[data]'."
        ) from None
