"""A folder as COCO comes, and one with drawn shapes."""

import json

import pytest
import torch

from natgrad.errors import DataError, SettingError
from natgrad.lab.data import Instances, coco_folder, draw_shapes
from unit.lab.data.error_text import says

pytest.importorskip("PIL")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    return draw_shapes(tmp_path_factory.mktemp("shapes"), train=6, test=4, side=48)


def test_shapes(drawn):
    train, test = coco_folder(drawn)
    assert isinstance(train, Instances)
    assert (len(train), len(test)) == (6, 4)
    assert train.classes == test.classes == ("background", "circle", "square", "triangle")
    for images, targets in (train.take(range(6), [[]] * 6), test.take(range(4), [[]] * 4)):
        for image, target in zip(images, targets, strict=True):
            assert image.shape == (3, 48, 48)
            assert 1 <= len(target["boxes"]) <= 3
            assert target["masks"].sum(0).max() == 1  # none covers another
            for box, mask, area in zip(
                *(target[n] for n in ("boxes", "masks", "area")), strict=True
            ):
                rows, columns = mask.nonzero().T
                assert int(mask.sum()) == area > 10
                middles = torch.stack([columns.min(), rows.min(), columns.max(), rows.max()]) + 0.5
                assert (box[:2] <= middles[:2]).all()
                assert (box[2:] >= middles[2:]).all()
                assert (middles - box).abs().max() < 2


def test_shapes_are_those_of_the_seed(drawn, tmp_path):
    same = draw_shapes(tmp_path / "same", train=6, test=4, side=48)
    other = draw_shapes(tmp_path / "other", train=6, test=4, side=48, seed=1)
    files = [path.relative_to(drawn) for path in sorted(drawn.rglob("*.*"))]
    assert len(files) == 12
    for file in files:
        assert (same / file).read_bytes() == (drawn / file).read_bytes()
        assert (other / file).read_bytes() != (drawn / file).read_bytes()


def test_what_cannot_be_drawn(tmp_path):
    says(
        SettingError,
        "Shapes are drawn on 5 and 0 images of 16 pixels but there must be at least 1 of each, of "
        "at least 32 pixels: pass such numbers.",
        draw_shapes,
        tmp_path,
        train=5,
        test=0,
        side=16,
    )


def changed(folder, part, change):
    path = folder / "annotations" / f"instances_{part}.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_crowds_and_empty_images_are_judged_and_not_learnt(tmp_path):
    home = draw_shapes(tmp_path, train=3, test=3, side=32)
    for part in ("train", "val"):

        def change(content):
            content["annotations"] = [a for a in content["annotations"] if a["image_id"] != 0]
            for one in content["annotations"]:
                one["iscrowd"] = int(one["image_id"] == 1)

        changed(home, part, change)
    train, test = coco_folder(home)
    assert [about["id"] for about in train.images] == [2]
    assert [len(test[i][1]["boxes"]) > 0 for i in range(3)] == [False, True, True]
    assert test[1][1]["iscrowd"].all()


def test_mirrored(drawn):
    train, test = coco_folder(drawn, flip=True)
    assert (train.chances, test.chances) == (1, 0)
    plain = train.unflipped()
    assert plain.chances == 0
    assert plain.classes == train.classes
    image = plain.take([2], [[]])[0][0]
    assert torch.equal(train.take([2], [[0.9]])[0][0], image)
    assert torch.equal(train.take([2], [[0.1]])[0][0], image.flip(2))


def test_a_year_in_the_names(tmp_path, monkeypatch):
    home = draw_shapes(tmp_path / "coco", train=1, test=1, side=32)
    for part in ("train", "val"):
        (home / part).rename(home / f"{part}2017")
        annotations = home / "annotations"
        (annotations / f"instances_{part}.json").rename(annotations / f"instances_{part}2017.json")
    monkeypatch.setenv("NATGRAD_DATA", str(tmp_path))
    assert len(coco_folder().test) == 1  # by its usual name


def test_what_is_missing_or_ambiguous(tmp_path, drawn):
    says(
        DataError,
        f"{tmp_path} has no file annotations/instances_train*.json but needs one, as COCO comes: "
        "name a folder with it.",
        coco_folder,
        tmp_path,
    )
    home = draw_shapes(tmp_path / "two", train=1, test=1, side=32)
    file = home / "annotations" / "instances_val.json"
    (home / "annotations" / "instances_val2014.json").write_bytes(file.read_bytes())
    says(
        DataError,
        f"{home} has 2 files annotations/instances_val*.json but needs one, as COCO comes: name a "
        "folder with it.",
        coco_folder,
        home,
    )


def test_different_categories(tmp_path):
    home = draw_shapes(tmp_path, train=1, test=1, side=32)
    changed(home, "val", lambda content: content["categories"][0].update(name="disc"))
    says(
        DataError,
        f"{home}/annotations/instances_train.json and {home}/annotations/instances_val.json have "
        "different categories: give both the same.",
        coco_folder,
        home,
    )
