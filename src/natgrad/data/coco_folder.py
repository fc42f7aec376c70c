"""A folder as COCO comes: ``annotations/instances_train2017.json``, ``train2017``, and ``val``."""

from pathlib import Path

from natgrad.data import places
from natgrad.data.coco import Instances, coco_instances
from natgrad.data.rows import Split
from natgrad.errors import DataError

_PREFIX = "instances_"


def coco_folder(folder: Path | str = "coco", *, flip: bool = False) -> Split[Instances]:
    """``folder`` has the folders ``annotations``, ``train…`` and ``val…``, of any year.

    Images without objects are not learnt from, but judged; so are crowds. ``flip``: mirror every
    other image that is learnt from."""
    home = places.folder(folder, "COCO's images and annotations")
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
