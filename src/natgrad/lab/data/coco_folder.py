"""A folder as COCO comes: ``annotations/instances_train2017.json``, ``train2017``, and ``val``."""

from pathlib import Path

from natgrad.errors import DataError
from natgrad.lab.data import locations
from natgrad.lab.data.coco import Instances, coco_instances
from natgrad.lab.data.dataset import Split

_PREFIX = "instances_"


def coco_folder(folder: Path | str = "coco", *, flip: bool = False) -> Split[Instances]:
    """COCO, to learn from and to judge by. Images without objects are not learnt from, but judged;
    so are crowds.

    Arguments:
        folder: with ``annotations/instances_train….json``, ``annotations/instances_val….json`` and
            the folders of images that these are named after, of any year; as named or below one of
            the places where data are looked for.
        flip: whether every other image that is learnt from is mirrored, at random.
    """
    home = locations.folder(folder, "COCO's images and annotations")
    learnt, judged = _year(home, "train"), _year(home, "val")
    train = coco_instances(*learnt, flip=flip).with_objects()
    test = coco_instances(*judged, crowds=True)
    if train.classes != test.classes:
        raise DataError(
            f"{learnt[0]} and {judged[0]} have different categories: give both the same."
        )
    return Split(train, test)


def _year(home: Path, part: str) -> tuple[Path, Path]:
    """The file of annotations and the folder of images."""
    pattern = f"annotations/{_PREFIX}{part}*.json"
    files = sorted(home.glob(pattern))
    if len(files) != 1:
        many = f"{len(files)} files" if files else "no file"
        raise DataError(
            f"{home} has {many} {pattern} but needs one, as COCO comes: name a folder with it."
        )
    return files[0], home / files[0].stem.removeprefix(_PREFIX)
