"""A folder for each class, prepared as the papers do."""

import numpy as np
import pytest
import torch

from natgrad.errors import DataError
from natgrad.lab.data import Normalise, Squeeze, Zoom, image_folder, loader, mean_image
from unit.lab.data.error_text import says
from unit.lab.data.image_fixtures import cut, draw, noise

CROP = Squeeze(12, 8)


@pytest.fixture
def folder(tmp_path):
    for seed, name in enumerate(
        ("train/cat/a.png", "train/cat/b.png", "train/dog/c.png", "val/dog/d.png")
    ):
        draw(tmp_path / name, noise(20, 30, seed=seed))
    draw(tmp_path / "val/cat/gray.jpg", noise(20, 30, 1))
    return tmp_path


def test_labels_and_sizes(folder):
    train, test = image_folder(folder, CROP)
    assert train.classes == test.classes == ("cat", "dog")
    assert train.labels.tolist() == [0, 0, 1]
    assert [file.name for file in test.files] == ["gray.jpg", "d.png"]
    ((x, y),) = loader(train, 3)
    assert x.shape == (3, 3, 8, 8)
    assert x.dtype == torch.float32
    assert sorted(y.tolist()) == [0, 0, 1]
    assert len(list(loader(image_folder(folder, Zoom(8, 12)).train, 2))) == 2


def test_training_draws_and_judging_does_not(folder):
    train, test = image_folder(folder, CROP)
    it = loader(train, 3, shuffle=True)
    first, second = next(iter(it)), next(iter(it))
    assert not torch.equal(first[0][first[1] == 1], second[0][second[1] == 1])
    assert (train.chances, test.chances) == (3, 0)
    it = loader(test, 2)
    (x, y), (again, z) = next(iter(it)), next(iter(it))
    assert torch.equal(x[y.argsort()], again[z.argsort()])


def test_the_means_are_subtracted_and_the_scale_is_one(folder):
    _, test = image_folder(folder, CROP)
    x, _ = test.take([1], np.zeros((1, 0)))
    middle = torch.from_numpy(np.array(CROP.middle(_opened(test.files[1])))).permute(2, 0, 1)
    expected = middle / 255 - torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    torch.testing.assert_close(x[0], expected)


def _opened(path):
    from PIL import Image

    return Image.open(path)


def test_the_mean_image(folder):
    train, _ = image_folder(folder, CROP)
    mean = mean_image(train, CROP)
    corners = [np.array(CROP.corner(_opened(file))) for file in train.files]
    expected = torch.from_numpy(np.mean(corners, 0) / 255).permute(2, 0, 1)
    torch.testing.assert_close(mean.double(), expected, rtol=0, atol=1e-6)
    again = image_folder(folder, CROP, Normalise(mean, (1.0,) * 3))
    assert next(iter(loader(again.train, 3)))[0].shape == (3, 3, 8, 8)
    assert mean_image(train).shape == (3, 224, 224)


def test_found_by_name(folder, places):
    places.data.mkdir()
    (folder / "train").rename(places.data / "train")
    (folder / "val").rename(places.data / "test")
    (places.cache).mkdir()
    places.data.rename(places.cache / "pets")
    assert len(image_folder("pets", CROP).test) == 2


def test_messages(folder):
    (folder / "val").rename(folder / "other")
    says(
        DataError,
        f"{folder} has 'train' but none of val, valid, validation, test: put images to judge by "
        "there.",
        lambda: image_folder(folder),
    )
    (folder / "other").rename(folder / "val")
    draw(folder / "val/bird/x.png", noise(4, 4))
    says(
        DataError,
        f"{folder / 'val/bird'} is a class that there is nothing to learn about: rename it, or "
        "remove it.",
        lambda: image_folder(folder),
    )
    (folder / "train").rename(folder / "somewhere")
    says(
        DataError,
        f"{folder} has no folder 'train': put a folder for each class into it.",
        lambda: image_folder(folder),
    )
    (folder / "train").mkdir()
    says(
        DataError,
        f"{folder / 'train'} has no folder in it: make one for each class.",
        lambda: image_folder(folder),
    )
    (folder / "train/cat").mkdir()
    with pytest.raises(DataError, match=r"has classes but no images in them: put files there that"):
        image_folder(folder)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_corrupt_image(folder, workers):
    train, _ = image_folder(folder, CROP)
    cut(train.files[2], 500)
    with pytest.raises(DataError, match=r"^\S+c.png is no image or is corrupt \(.*remove it\.$"):
        list(loader(train, 3, workers=workers))
