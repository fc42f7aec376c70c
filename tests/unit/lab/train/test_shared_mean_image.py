"""Images of a folder as `natgrad train` prepares them, against what is written out here."""

import math

import numpy as np
import pytest
import torch

from natgrad.comm import Alone
from natgrad.errors import SettingError
from natgrad.lab.data import image_files
from natgrad.lab.train.training import Training
from unit.lab.data.image_fixtures import Image, draw, noise
from unit.lab.train import digit_runs as runs

SIZE, SIDE = 32, 37  # 37 = round(32 · 256 / 224)
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NATGRAD_CACHE", str(tmp_path / "cache"))
    for number in range(6):
        name = f"{'cat' if number % 2 else 'dog'}/{number}.png"
        draw(tmp_path / "images/train" / name, noise(40 + 3 * number, 60, seed=number))
        draw(tmp_path / "images/val" / name, noise(50, 70 - 4 * number, seed=10 + number))
    return tmp_path / "images"


def training(folder, **others):
    values = {"data": "imagenet", "folder": str(folder), "image": SIZE, "network": "resnet18"}
    values |= {"mixup": 0.0, "erasing": 0.0, "batch_size": 4, "steps": 2, "kfac": False}
    settings = runs.settings(**{**values, **others})
    return Training(settings, Alone(), torch.device("cpu"))


def pixels(file, box=None, size=(SIDE, SIDE)):
    """``[h, w, 3]`` from 0 to 1, of a part of the image at another size."""
    return np.array(Image.open(file).resize(size, Image.Resampling.BILINEAR, box), np.float64) / 255


def size_of(file):
    with Image.open(file) as image:
        return image.size


def cut(image, left, top):
    return image[top : top + SIZE, left : left + SIZE]


def squeezed(file, chances):
    room = SIDE - SIZE + 1
    found = cut(pixels(file), int(chances[0] * room), int(chances[1] * room))
    return found[:, ::-1] if chances[2] < 0.5 else found


def zoomed(file, chances):
    width, height = size_of(file)
    for share, slant in chances[3:].reshape(-1, 2):
        area, aspect = (0.08 + 0.92 * share) * width * height, (3 / 4) ** (1 - 2 * slant)
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if w <= width and h <= height:
            left, top = int(chances[0] * (width - w + 1)), int(chances[1] * (height - h + 1))
            found = pixels(file, (left, top, left + w, top + h), (SIZE, SIZE))
            return found[:, ::-1] if chances[2] < 0.5 else found
    raise AssertionError("choose other chances")


def middle_squeezed(file):
    return cut(pixels(file), (SIDE - SIZE) // 2, (SIDE - SIZE) // 2)


def middle_zoomed(file):
    width, height = size_of(file)
    scale = SIDE / min(width, height)
    width, height = round(width * scale), round(height * scale)
    return cut(pixels(file, size=(width, height)), (width - SIZE) // 2, (height - SIZE) // 2)


def assert_prepared(rows, files, prepared, subtracted, divisor):
    drawn = np.random.default_rng(3).random((len(rows), rows.chances))
    inputs, _ = rows.take(list(range(len(rows))), drawn)
    for file, chances, found in zip(files, drawn, inputs, strict=True):
        expected = (prepared(file, chances) - subtracted) / divisor
        np.testing.assert_allclose(found.permute(1, 2, 0), expected, rtol=0, atol=2e-6)


def test_the_mean_image_is_subtracted(folder):
    run = training(folder, mean_image=True)
    train, test = run.task.train, run.task.test
    mean = np.mean([cut(pixels(file), 0, 0) for file in train.files], 0)
    assert len(train) == 6
    assert_prepared(train, train.files, squeezed, mean, 1.0)
    assert_prepared(test, test.files, lambda file, _: middle_squeezed(file), mean, 1.0)
    assert all(float(run.step(step, batches)) > 0 for step, batches in run.batches(0))


def test_or_the_mean_colour(folder):
    run = training(folder)
    assert_prepared(run.task.train, run.task.train.files, squeezed, MEAN, 1.0)


def test_zoomed(folder):
    run = training(folder, crop="zoom")
    train, test = run.task.train, run.task.test
    assert_prepared(train, train.files, zoomed, MEAN, DEVIATION)
    assert_prepared(test, test.files, lambda file, _: middle_zoomed(file), MEAN, DEVIATION)


def test_parts_have_the_mean_of_all(folder):
    run = training(folder, mean_image=True, train_samples=4, test_samples=3, fit_samples=2)
    whole = run.task.train.whole
    mean = np.mean([cut(pixels(file), 0, 0) for file in whole.files], 0)
    files = [whole.files[row] for row in run.task.train.rows]
    assert_prepared(run.task.train, files, squeezed, mean, 1.0)
    files = [run.task.test.whole.files[row] for row in run.task.test.rows]
    assert_prepared(run.task.test, files, lambda file, _: middle_squeezed(file), mean, 1.0)
    fit = run.task.fit
    files = [files_of(fit)[row] for row in fit.rows]
    assert_prepared(fit, files, squeezed, mean, 1.0)


def files_of(rows):
    """Of the data set that ``rows`` are a part of."""
    whole = rows.whole
    return getattr(whole, "files", None) or [files_of(whole)[row] for row in whole.rows]


def test_images_are_read_for_it_once(folder, monkeypatch):
    first = training(folder, mean_image=True)
    mean = first.task.train.normalise.mean

    def refuse(*args):
        raise AssertionError("an image is read")

    monkeypatch.setattr(image_files, "opened", refuse)
    again = training(folder, mean_image=True)
    assert torch.equal(again.task.train.normalise.mean, mean)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"mean_image": True, "crop": "zoom"},
            "mean_image is the mean of images that crop squeeze cuts but the crop is zoom: leave "
            "one of the two out.",
        ),
        (
            {"data": "digits", "image": 0, "mean_image": True},
            "crop and mean_image are for the data imagenet but they are digits: leave them out.",
        ),
        (
            {"data": "digits", "image": 0, "crop": "zoom"},
            "crop and mean_image are for the data imagenet but they are digits: leave them out.",
        ),
        (
            {"crop": "stretch"},
            "crop is 'stretch' but must be one of squeeze, zoom: name one of them.",
        ),
    ],
)
def test_messages(values, message):
    with pytest.raises(SettingError) as error:
        training("", **values)
    assert str(error.value) == message
