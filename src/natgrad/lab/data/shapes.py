"""Circles, squares and triangles in COCO's format, drawn on noise: something small to detect."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from natgrad.errors import SettingError
from natgrad.lab.data import image_files, masks

KINDS = {"circle": 32, "square": 4, "triangle": 3}  # corners
_MOST = 3  # in an image

Points = npt.NDArray[np.float64]


def draw_shapes(
    folder: Path | str, *, train: int = 200, test: int = 50, side: int = 128, seed: int = 0
) -> Path:
    """Draw images with one to three shapes each, none of which covers another. Returns the folder.

    Arguments:
        folder: to write to, as `coco_folder` reads it.
        train: images to learn from, at least 1.
        test: images to judge by, at least 1.
        side: pixels of an image's sides, at least 32.
        seed: of the random numbers; the same numbers give the same files.
    """
    if min(train, test) < 1 or side < 32:
        raise SettingError(
            f"Shapes are drawn on {train} and {test} images of {side} pixels but there must be at "
            "least 1 of each, of at least 32 pixels: pass such numbers."
        )
    home = Path(folder)
    for part, (name, count) in enumerate((("train", train), ("val", test))):
        _write(home, name, count, side, np.random.default_rng((seed, part)))
    return home


def _write(home: Path, name: str, count: int, side: int, draw: np.random.Generator) -> None:
    (home / name).mkdir(parents=True, exist_ok=True)
    (home / "annotations").mkdir(exist_ok=True)
    images: list[dict[str, Any]] = []
    objects: list[dict[str, Any]] = []
    for number in range(count):
        pixels, drawn = _image(side, draw)
        about = {"id": number, "file_name": f"{number:05d}.png", "height": side, "width": side}
        image_files.write(home / name / f"{number:05d}.png", pixels)
        images.append(about)
        for kind, points, mask in drawn:
            low, high = points.min(0), points.max(0)
            objects.append(
                {
                    "id": len(objects) + 1,
                    "image_id": number,
                    "category_id": kind + 1,
                    "bbox": [*low.tolist(), *(high - low).round(2).tolist()],
                    "segmentation": [points.flatten().tolist()],
                    "area": int(mask.sum()),
                    "iscrowd": 0,
                }
            )
    kinds = [{"id": i, "name": kind} for i, kind in enumerate(KINDS, start=1)]
    content = {"images": images, "annotations": objects, "categories": kinds}
    path = home / "annotations" / f"instances_{name}.json"
    path.write_text(json.dumps(content), encoding="utf-8")


def _image(
    side: int, draw: np.random.Generator
) -> tuple[npt.NDArray[np.uint8], list[tuple[int, Points, masks.Mask]]]:
    """``[side, side, 3]``, and what is on it"""
    pixels = draw.uniform(60, 120, 3) + draw.normal(0, 15, (side, side, 3))
    drawn: list[tuple[int, Points, masks.Mask]] = []
    taken = np.zeros((side, side), bool)
    wanted = int(draw.integers(1, _MOST + 1))
    while len(drawn) < wanted:
        kind = int(draw.integers(len(KINDS)))
        radius = draw.uniform(0.09, 0.2) * side
        points = _outline(list(KINDS.values())[kind], draw) * radius
        points = (points + draw.uniform(radius + 1, side - radius - 1, 2)).round(2)
        mask = masks.polygon(points.flatten().tolist(), side, side)
        if (taken & (mask > 0)).any():
            continue
        taken |= mask > 0
        colour = draw.uniform(0, 255, 3)
        colour[draw.integers(3)] = 255  # brighter than what is behind it
        pixels[mask > 0] = colour + draw.normal(0, 15, (int(mask.sum()), 3))
        drawn.append((kind, points, mask))
    return pixels.clip(0, 255).astype(np.uint8), drawn


def _outline(corners: int, draw: np.random.Generator) -> Points:
    """On the unit circle, turned at random: ``[corners, 2]``"""
    angles = 2 * np.pi * (np.arange(corners) / corners + draw.uniform())
    return np.stack([np.cos(angles), np.sin(angles)], 1)
