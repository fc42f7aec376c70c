"""Objects in photographs, in COCO's format: a box, a class, a mask for each (Lin et al. 2014)."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from natgrad.errors import DataError
from natgrad.lab.data import image_files, locations, masks
from natgrad.lab.data.dataset import Rows
from natgrad.lab.data.random_numbers import Chances

Target = dict[str, Tensor]


class Instances(Rows):
    """Batches are two lists, as Mask R-CNN takes them: images ``[3, h, w]`` from 0 to 1, and
    targets with ``boxes [k, 4]`` (left, top, right, bottom), ``labels [k]`` from 1 on, ``masks
    [k, h, w]`` of zeros and ones, ``area [k]``, ``iscrowd [k]`` and ``image_id``.

    Arguments:
        file: of the annotations, for error sentences.
        folder: of the images.
        images: COCO's entries of the images: ``id``, ``file_name``, ``height`` and ``width``.
        objects: by the id of an image, COCO's annotations of it.
        classes: by COCO's id, in increasing order, the names; labels count from 1 in that order.
        flip: whether every other image is mirrored, at random.
    """

    def __init__(
        self,
        file: Path,
        folder: Path,
        images: Sequence[Mapping[str, Any]],
        objects: Mapping[int, Sequence[Mapping[str, Any]]],
        classes: Mapping[int, str],
        flip: bool,
    ) -> None:
        self.file, self.folder, self.images = file, folder, tuple(images)
        self.objects, self.flip = objects, flip
        self.classes = ("background", *classes.values())
        self._label = {number: i for i, number in enumerate(classes, start=1)}
        self.chances = 1 if flip else 0

    def __len__(self) -> int:
        return len(self.images)

    def with_objects(self) -> "Instances":
        """Without the images in which there is nothing to learn from."""
        images = [image for image in self.images if self.objects.get(image["id"])]
        if not images:
            raise DataError(f"{self.file} has no image with an object: give annotations.")
        names = dict(zip(self._label, self.classes[1:], strict=True))
        return Instances(self.file, self.folder, images, self.objects, names, self.flip)

    def unflipped(self) -> "Instances":
        """With all images as they are."""
        names = dict(zip(self._label, self.classes[1:], strict=True))
        return Instances(self.file, self.folder, self.images, self.objects, names, False)

    def take(self, rows: Sequence[int], chances: Chances) -> tuple[list[Tensor], list[Target]]:
        images, targets = [], []
        for row, drawn in zip(rows, chances, strict=True):
            image, target = self._read(self.images[row])
            if self.flip and drawn[0] < 0.5:
                image, target = _mirrored(image, target)
            images.append(image)
            targets.append(target)
        return images, targets

    def _read(self, about: Mapping[str, Any]) -> tuple[Tensor, Target]:
        path = self.folder / about["file_name"]
        image = image_files.tensor(image_files.opened(path, "RGB")).float() / 255
        size = (about["height"], about["width"])
        if tuple(image.shape[1:]) != size:
            raise locations.spoilt(
                path, f"has {list(image.shape[1:])} pixels but {self.file} says {list(size)}"
            )
        found = self.objects.get(about["id"], ())
        masks = [self._mask(one, *size) for one in found]
        boxes = torch.tensor([one["bbox"] for one in found], dtype=torch.float32).view(-1, 4)
        boxes[:, 2:] += boxes[:, :2]
        boxes[:, 0::2].clamp_(0, size[1])
        boxes[:, 1::2].clamp_(0, size[0])
        target = {
            "boxes": boxes,
            "labels": torch.tensor(
                [self._label[one["category_id"]] for one in found], dtype=torch.int64
            ),
            "masks": torch.from_numpy(np.stack(masks)) if masks else torch.zeros(0, *size).byte(),
            "area": torch.tensor(
                [one.get("area", mask.sum()) for one, mask in zip(found, masks, strict=True)],
                dtype=torch.float32,
            ),
            "iscrowd": torch.tensor([one.get("iscrowd", 0) for one in found], dtype=torch.int64),
            "image_id": torch.tensor(about["id"]),
        }
        return image, target

    def _mask(self, one: Mapping[str, Any], height: int, width: int) -> masks.Mask:
        try:
            return masks.mask(one.get("segmentation"), height, width)
        except ValueError as error:
            raise locations.spoilt(
                self.file, f"is corrupt: annotation {one['id']} {error}"
            ) from error


def coco_instances(
    annotations: Path | str,
    images: Path | str,
    *,
    flip: bool = False,
    crowds: bool = False,
) -> Instances:
    """Objects of COCO's format. Those without an extent are left out; a file that is not in the
    format raises `DataError`.

    Arguments:
        annotations: the JSON file, as named or below one of the places where data are looked for.
        images: the folder of the images, likewise.
        flip: whether every other image is mirrored, at random.
        crowds: whether regions that stand for many objects are there, with ``iscrowd`` 1.
    """
    file = locations.file(annotations, "annotations")
    content = _parsed(file)
    listed = {about["id"]: about for about in content["images"]}
    classes = {kind["id"]: kind["name"] for kind in content["categories"]}
    objects: dict[int, list[Mapping[str, Any]]] = {}
    for one in content["annotations"]:
        for name, known in (("image_id", listed), ("category_id", classes)):
            if one[name] not in known:
                raise locations.spoilt(
                    file, f"is corrupt: annotation {one['id']} has the {name} {one[name]} of none"
                )
        if min(one["bbox"][2:]) > 0 and (crowds or not one.get("iscrowd", 0)):
            objects.setdefault(one["image_id"], []).append(one)
    folder = locations.folder(images, "images")
    return Instances(file, folder, content["images"], objects, dict(sorted(classes.items())), flip)


_NEEDED = {
    "images": ("id", "file_name", "height", "width"),
    "annotations": ("id", "image_id", "category_id", "bbox"),
    "categories": ("id", "name"),
}


def _parsed(file: Path) -> Mapping[str, Any]:
    """With all that is needed in it."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise locations.spoilt(file, f"is no JSON or is corrupt ({error})") from error
    for part, names in _NEEDED.items():
        entries = content.get(part) if isinstance(content, dict) else None
        if not isinstance(entries, list):
            raise locations.spoilt(file, f"is not in COCO's format: it has no list {part!r}")
        for entry in entries:
            for name in names:
                if not isinstance(entry, dict) or name not in entry:
                    raise locations.spoilt(
                        file, f"is not in COCO's format: one of its {part} has no {name!r}"
                    )
            if part == "annotations" and not _is_box(entry["bbox"]):
                raise locations.spoilt(
                    file,
                    f"is corrupt: annotation {entry['id']} has the box {entry['bbox']}, not left, "
                    "top, width and height",
                )
    if not content["images"]:
        raise locations.spoilt(file, "lists no images")
    return content  # type: ignore[no-any-return]


def _is_box(box: Any) -> bool:
    return (
        isinstance(box, list)
        and len(box) == 4
        and all(isinstance(number, int | float) for number in box)
    )


def _mirrored(image: Tensor, target: Target) -> tuple[Tensor, Target]:
    boxes = target["boxes"].clone()
    boxes[:, 0::2] = image.shape[2] - boxes[:, [2, 0]]
    return image.flip(2), target | {"boxes": boxes, "masks": target["masks"].flip(2)}
