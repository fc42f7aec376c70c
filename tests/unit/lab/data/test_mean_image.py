"""The mean image: exact whoever adds it up, and kept until an image changes."""

import os
import re
from importlib import import_module

import numpy as np
import pytest
import torch

from natgrad.lab.data import Squeeze, image_folder, mean_image
from natgrad.lab.data.mean_image import Corners
from unit.lab.data.image_fixtures import Image, draw, noise

CROP = Squeeze(12, 8)


@pytest.fixture
def train(tmp_path, places):
    for number in range(7):
        name = f"train/{'cat' if number < 3 else 'dog'}/{number}.png"
        draw(tmp_path / name, noise(20 + number, 30, seed=number))
    draw(tmp_path / "val/cat/x.png", noise(9, 9))
    return image_folder(tmp_path, CROP).train


def mean_of(files):
    """``[8, 8, 3]``, pixel by pixel."""
    corners = []
    for file in files:
        squeezed = Image.open(file).resize((12, 12), Image.Resampling.BILINEAR)
        corners.append(np.array(squeezed, np.float64)[:8, :8])
    return np.mean(corners, 0) / 255


def test_it_is_the_mean_of_the_corners(train, monkeypatch):
    module = import_module("natgrad.lab.data.mean_image")  # the function has its name
    monkeypatch.setattr(module, "_AT_ONCE", 3)  # 3 + 3 + 1
    expected = torch.from_numpy(mean_of(train.files)).permute(2, 0, 1).float()
    for workers in (0, 2):
        assert torch.equal(mean_image(train, CROP, workers=workers), expected)


@pytest.mark.parametrize("ranks", [2, 3, 9])
def test_shares_add_up_exactly(train, ranks):
    corners = Corners(train, CROP)
    shares = [corners.total(rank, ranks) for rank in range(ranks)]
    assert torch.equal(sum(shares), corners.total())


def test_it_is_kept(train, places):
    total = Corners(train, CROP).total()
    assert Corners(train, CROP).kept() is None
    Corners(train, CROP).keep(total)
    assert torch.equal(Corners(train, CROP).kept(), total)
    assert len(list((places.cache / "mean-images").iterdir())) == 1


def rename(file):
    file.rename(file.with_stem(f"{file.stem}b"))  # which leaves the order as it is


def grow(file):
    time = file.stat().st_mtime_ns
    with file.open("ab") as end:
        end.write(b" ")
    os.utime(file, ns=(time, time))


def touch(file):
    os.utime(file, ns=(1, 1))


def remove(file):
    file.unlink()


@pytest.mark.parametrize("change", [rename, grow, touch, remove])
def test_until_a_file_changes(train, tmp_path, change):
    Corners(train, CROP).keep(Corners(train, CROP).total())
    assert Corners(image_folder(tmp_path, CROP).train, CROP).kept() is not None
    change(train.files[4])
    assert Corners(image_folder(tmp_path, CROP).train, CROP).kept() is None


def test_another_crop_has_its_own(train, tmp_path):
    Corners(train, CROP).keep(Corners(train, CROP).total())
    for crop in (Squeeze(13, 8), Squeeze(12, 7)):
        assert Corners(train, crop).kept() is None


def test_the_folder_may_move(train, tmp_path):
    Corners(train, CROP).keep(Corners(train, CROP).total())
    (tmp_path / "elsewhere").mkdir()
    for name in ("train", "val"):
        (tmp_path / name).rename(tmp_path / "elsewhere" / name)
    assert Corners(image_folder(tmp_path / "elsewhere", CROP).train, CROP).kept() is not None


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"PK", b"no array at all"])
def test_a_spoilt_one_is_none(train, places, content):
    Corners(train, CROP).keep(Corners(train, CROP).total())
    (file,) = (places.cache / "mean-images").iterdir()
    file.write_bytes(content)
    assert Corners(train, CROP).kept() is None
    np.save(file, np.zeros((3, 8, 7), np.int64))
    assert Corners(train, CROP).kept() is None


def test_a_cache_that_cannot_be_written(train, places):
    places.cache.mkdir()
    home = places.cache / "mean-images"
    home.write_bytes(b"in the way")
    said = (
        f"The mean image could not be kept in {home} (File exists), so the next run reads all "
        "images for it again: name another folder in NATGRAD_CACHE."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(said)}$"):
        Corners(train, CROP).keep(Corners(train, CROP).total())
