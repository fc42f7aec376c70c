"""The mean image, ``Σ corner / (255 n)`` over the upper left corners of images (Osawa 2019)."""

import hashlib
import os
import warnings
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from natgrad.lab.data import image_files, prefetch
from natgrad.lab.data.crops import Squeeze
from natgrad.lab.data.image_folder import ImageFolder
from natgrad.lab.data.locations import cache
from natgrad.operators.progress import track

_AT_ONCE = 64  # images that are added up before a worker hands them on


def mean_image(images: ImageFolder, crop: Squeeze | None = None, *, workers: int = 0) -> Tensor:
    """The mean ``[3, size, size]`` over the corners of all images, from 0 to 1.

    Arguments:
        images: all of them are read once.
        crop: whose upper left corners are averaged; ``None`` is ``Squeeze()``.
        workers: processes that read; 0 reads here.
    """
    corners = Corners(images, Squeeze() if crop is None else crop)
    return corners.mean(corners.total(workers=workers))


class Corners:
    """Those of all images of a folder. Their sum is of whole numbers, so that it is the same
    whoever adds up which part of it."""

    def __init__(self, images: ImageFolder, crop: Squeeze) -> None:
        self.images, self.crop = images, crop
        self.shape = (3, crop.size, crop.size)

    def total(self, rank: int = 0, ranks: int = 1, workers: int = 0) -> Tensor:
        """``[3, size, size]``, of the images that fall to one of ``ranks``."""
        files = self.images.files[rank::ranks]
        chunks = [files[i : i + _AT_ONCE] for i in range(0, len(files), _AT_ONCE)]
        sums = prefetch.read(self._added, chunks, workers)
        found = torch.zeros(self.shape, dtype=torch.int64)
        # A chunk is a sum; only a list knows how many there are.
        for _ in track(chunks, "mean image", None if rank == 0 else False):
            found += next(sums)
        return found

    def mean(self, total: Tensor) -> Tensor:
        """``[3, size, size] -> [3, size, size]``, from 0 to 1"""
        return (total.double() / (255 * len(self.images))).float()

    def kept(self) -> Tensor | None:
        """The sum over all images, if it is in the cache."""
        try:
            found = np.load(_home() / self._name, allow_pickle=False)
        except (OSError, ValueError, EOFError):  # none, or one that is spoilt
            return None
        right = found.shape == self.shape and found.dtype == np.int64
        return torch.from_numpy(found) if right else None

    def keep(self, total: Tensor) -> None:
        """Until a file of the folder has another name, size or time."""
        part = _home() / f".{os.getpid()}.part"
        try:
            part.parent.mkdir(parents=True, exist_ok=True)
            with part.open("wb") as file:
                np.save(file, total.numpy())
            os.replace(part, part.with_name(self._name))
        except OSError as error:
            warnings.warn(
                f"The mean image could not be kept in {part.parent} ({error.strerror}), so "
                "the next run reads all images for it again: name another folder in NATGRAD_CACHE.",
                stacklevel=2,
            )

    @cached_property
    def _name(self) -> str:
        known = hashlib.sha256(f"{self.crop.side} {self.crop.size}".encode())
        for file in self.images.files:
            about = file.stat()
            name = f"\n{file.parent.name}/{file.name} {about.st_size} {about.st_mtime_ns}"
            known.update(name.encode("utf-8", "surrogateescape"))
        return f"{known.hexdigest()[:32]}.npy"

    def _added(self, files: Sequence[Path]) -> Tensor:
        corners = [
            image_files.tensor(self.crop.corner(image_files.opened(f, "RGB"))) for f in files
        ]
        return torch.stack(corners).sum(0)


def _home() -> Path:
    return cache() / "mean-images"
