"""Objects in COCO's format, as Mask R-CNN takes them."""

import json

import numpy as np
import pytest
import torch

from natgrad.errors import DataError
from natgrad.lab.data import coco_instances, loader
from unit.lab.data.error_text import says
from unit.lab.data.image_fixtures import draw, noise

SQUARE = [[1, 1, 6, 1, 6, 4, 1, 4]]


def annotation(number, image=7, **others):
    about = {"id": number, "image_id": image, "category_id": 18, "bbox": [1, 1, 5, 3]}
    return about | {"segmentation": SQUARE, "area": 15.0, "iscrowd": 0} | others


@pytest.fixture
def content(tmp_path):
    draw(tmp_path / "images/a.png", noise(6, 9))
    draw(tmp_path / "images/b.png", noise(4, 4, 1))
    runs = {"size": [6, 9], "counts": [0, 54]}
    return {
        "images": [
            {"id": 7, "file_name": "a.png", "height": 6, "width": 9},
            {"id": 3, "file_name": "b.png", "height": 4, "width": 4},
        ],
        "annotations": [
            annotation(1),
            annotation(2, bbox=[6, 0, 3.5, 7], category_id=90, segmentation=runs, area=54),
            annotation(3, bbox=[0, 0, 9, 6], iscrowd=1, segmentation=runs),
            annotation(4, bbox=[1, 1, 0, 2]),
        ],
        "categories": [{"id": 90, "name": "toothbrush"}, {"id": 18, "name": "dog"}],
    }


@pytest.fixture
def made(tmp_path, content):
    """``made(**options)`` writes the content and reads it."""

    def make(**options):
        (tmp_path / "instances.json").write_text(json.dumps(content))
        return coco_instances(tmp_path / "instances.json", tmp_path / "images", **options)

    return make


def test_targets(made, tmp_path):
    data = made()
    ((images, targets),) = loader(data, 2, shuffle=False)
    assert [tuple(image.shape) for image in images] == [(3, 6, 9), (3, 4, 4)]
    assert torch.equal(
        (images[0] * 255).round().permute(1, 2, 0), torch.tensor(noise(6, 9)).float()
    )
    target = targets[0]
    # Left, top, right, bottom, within the image.
    assert target["boxes"].tolist() == [[1, 1, 6, 4], [6, 0, 9, 6]]
    assert target["labels"].tolist() == [1, 2]
    assert data.classes == ("background", "dog", "toothbrush")
    assert target["masks"].shape == (2, 6, 9)
    assert target["masks"].dtype == torch.uint8
    assert target["masks"].sum((1, 2)).tolist() == [15, 54]
    assert bool(target["masks"][0, 1:4, 1:6].all())
    assert target["area"].tolist() == [15, 54]
    assert target["iscrowd"].tolist() == [0, 0]
    assert int(target["image_id"]) == 7


def test_an_image_without_objects(made):
    data = made()
    target = data[1][1]
    assert target["boxes"].shape == (0, 4)
    assert target["masks"].shape == (0, 4, 4)
    assert target["labels"].dtype == target["iscrowd"].dtype == torch.int64
    assert target["area"].dtype == torch.float32
    assert len(data) == 2
    some = data.with_objects()
    assert len(some) == 1
    assert some.classes == data.classes
    assert some[0][1]["labels"].tolist() == [1, 2]


def test_crowds(made):
    assert made(crowds=True)[0][1]["iscrowd"].tolist() == [0, 0, 1]


def test_mirrored(made):
    data, plain = made(flip=True), made()[0]
    (image,), (target,) = data.take([0], np.array([[0.2]]))
    assert torch.equal(image, plain[0].flip(2))
    assert target["boxes"].tolist() == [[3, 1, 8, 4], [0, 0, 3, 6]]
    assert torch.equal(target["masks"], plain[1]["masks"].flip(2))
    assert torch.equal(target["labels"], plain[1]["labels"])
    (image,), (target,) = data.take([0], np.array([[0.7]]))
    assert torch.equal(image, plain[0])
    assert torch.equal(target["boxes"], plain[1]["boxes"])


def test_an_area_that_is_not_told(made, content):
    del content["annotations"][0]["area"]
    assert made()[0][1]["area"].tolist() == [15, 54]


def test_found_by_name(made, places, tmp_path):
    made()
    (tmp_path / "data").mkdir()
    (tmp_path / "instances.json").rename(places.data / "coco.json")
    (tmp_path / "images").rename(places.data / "val2017")
    assert len(coco_instances("coco.json", "val2017")) == 2
    says(
        DataError,
        "The file 'no.json' of annotations was not found, neither as it is named nor in "
        f"{places.data}, {places.cache} or {places.debian}: name a file that is there.",
        lambda: coco_instances("no.json", "val2017"),
    )
    with pytest.raises(DataError, match="folder 'train2017' of images was not found"):
        coco_instances("coco.json", "train2017")


FILE_MESSAGES = [
    (lambda c: c.pop("images"), "is not in COCO's format: it has no list 'images'"),
    (lambda c: c.update(categories={}), "is not in COCO's format: it has no list 'categories'"),
    (
        lambda c: c["annotations"][1].pop("bbox"),
        "is not in COCO's format: one of its annotations has no 'bbox'",
    ),
    (
        lambda c: c["images"].append("x"),
        "is not in COCO's format: one of its images has no 'id'",
    ),
    (
        lambda c: c["annotations"][1].update(bbox=[1, 2, 3]),
        "is corrupt: annotation 2 has the box [1, 2, 3], not left, top, width and height",
    ),
    (
        lambda c: c["annotations"][0].update(image_id=99),
        "is corrupt: annotation 1 has the image_id 99 of none",
    ),
    (
        lambda c: c["annotations"][0].update(category_id=5),
        "is corrupt: annotation 1 has the category_id 5 of none",
    ),
    (lambda c: c["images"].clear(), "lists no images"),
]


@pytest.mark.parametrize(("spoil", "why"), FILE_MESSAGES)
def test_messages_about_the_file(made, content, tmp_path, spoil, why):
    spoil(content)
    path = tmp_path / "instances.json"
    says(DataError, f"{path} {why}: replace it or remove it.", made)


def test_no_json(tmp_path):
    path = tmp_path / "instances.json"
    path.write_text('{"images": [')
    with pytest.raises(
        DataError, match=r"instances.json is no JSON or is corrupt \(.*remove it\.$"
    ):
        coco_instances(path, tmp_path)
    path.write_text("[]")
    with pytest.raises(DataError, match="it has no list 'images'"):
        coco_instances(path, tmp_path)


def test_messages_about_images(made, content, tmp_path):
    content["annotations"][0]["segmentation"] = [[1, 2]]
    says(
        DataError,
        f"{tmp_path / 'instances.json'} is corrupt: annotation 1 has a polygon that is not three "
        "or more pairs of x and y: replace it or remove it.",
        lambda: made()[0],
    )
    content["images"][0]["height"] = 5
    says(
        DataError,
        f"{tmp_path / 'images/a.png'} has [6, 9] pixels but {tmp_path / 'instances.json'} says "
        "[5, 9]: replace it or remove it.",
        lambda: made()[0],
    )
    (tmp_path / "images/a.png").unlink()
    says(
        DataError,
        f"There is no image {tmp_path / 'images/a.png'}: put it there, or leave it out.",
        lambda: made()[0],
    )
    content["annotations"].clear()
    says(
        DataError,
        f"{tmp_path / 'instances.json'} has no image with an object: give annotations.",
        lambda: made().with_objects(),
    )
