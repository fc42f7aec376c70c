"""Images and masks stay together, whatever is cut out and turned."""

import numpy as np
import pytest
import torch

from natgrad.errors import DataError, SettingError
from natgrad.lab.data import loader, membrane, segmentation_folder
from natgrad.lab.data.sources import MEMBRANE
from unit.lab.data.error_text import says
from unit.lab.data.image_fixtures import Image, draw, noise


@pytest.fixture
def folder(tmp_path):
    """The mask is the brighter half of its image."""
    for i in range(10):
        numbers = noise(12, 16, 1, seed=i)
        draw(tmp_path / f"image/{i}.png", numbers)
        draw(tmp_path / f"label/{i}.png", 255 * (numbers > 127))
    return tmp_path


def gray(x):
    return (x * 0.25 + 0.5) * 255


@pytest.mark.parametrize("size", [None, 8, 12])
def test_masks_follow_their_images(folder, size):
    train, test = segmentation_folder(folder, size=size)
    assert (len(train), len(test)) == (8, 2)
    for part in (train, test):
        for x, y in loader(part, 2):
            assert x.shape == (2, 1, *((size, size) if size else (12, 16)))
            assert y.shape == x[:, 0].shape
            assert y.dtype == torch.int64
            assert torch.equal((gray(x[:, 0]) > 127.5).long(), y)


def test_all_symmetries_of_a_square_and_four_of_a_rectangle(tmp_path):
    for i in range(2):
        draw(tmp_path / f"image/{i}.png", np.arange(9).reshape(3, 3) * 10)
        draw(tmp_path / f"label/{i}.png", np.zeros((3, 3)))
    it = loader(segmentation_folder(tmp_path, test=0.5).train, 1)
    seen = {tuple(gray(x).round().flatten().int().tolist()) for _ in range(80) for x, _ in it}
    assert len(seen) == 8
    for i in range(2):
        draw(tmp_path / f"image/{i}.png", np.arange(6).reshape(2, 3) * 10)
        draw(tmp_path / f"label/{i}.png", np.zeros((2, 3)))
    it = loader(segmentation_folder(tmp_path, test=0.5).train, 1)
    seen = {tuple(gray(x).round().flatten().int().tolist()) for _ in range(60) for x, _ in it}
    assert len(seen) == 4


def test_crops_come_from_everywhere(tmp_path):
    for i in range(2):
        draw(tmp_path / f"image/{i}.png", np.arange(20).reshape(4, 5) * 10)
        draw(tmp_path / f"label/{i}.png", np.zeros((4, 5)))
    train, test = segmentation_folder(tmp_path, size=2, test=0.5)
    it = loader(train, 1)
    corners = {int(gray(x).min().round()) // 10 for _ in range(150) for x, _ in it}
    assert corners == {row * 5 + column for row in range(3) for column in range(4)}
    ((x, _),) = loader(test, 1)
    assert (gray(x).round() / 10).int().flatten().tolist() == [6, 7, 11, 12]


def test_classes_of_a_palette_and_what_is_ignored(tmp_path):
    for i in range(2):
        draw(tmp_path / f"image/{i}.png", noise(2, 3))
        path = tmp_path / f"label/{i}.png"
        path.parent.mkdir(exist_ok=True)
        mask = Image.fromarray(np.array([[0, 1, 2], [2, 255, 0]], np.uint8))
        mask.putpalette([i % 256 for i in range(768)])
        mask.save(path)
    _, test = segmentation_folder(tmp_path, values=range(3), ignore=255, colour=True, test=0.5)
    ((x, y),) = loader(test, 1)
    assert x.shape == (1, 3, 2, 3)
    assert y.tolist() == [[[0, 1, 2], [2, -100, 0]]]
    assert test.classes == 3


def test_masks_of_single_bits(tmp_path):
    for i in range(2):
        draw(tmp_path / f"image/{i}.png", noise(2, 2, 1))
        path = tmp_path / f"label/{i}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(np.array([[0, 255], [255, 0]], np.uint8)).convert("1").save(path)
    ((_, y),) = loader(segmentation_folder(tmp_path, test=0.5).test, 1)
    assert y.tolist() == [[[0, 1], [1, 0]]]


def test_messages(folder, tmp_path):
    says(
        SettingError,
        "test is 1 but must be in (0, 1): pass the share of images to judge by.",
        lambda: segmentation_folder(folder, test=1),
    )
    says(
        SettingError,
        "A mask's value is 256 but must be from 0 to 255: pass values of bytes.",
        lambda: segmentation_folder(folder, values=(0, 256)),
    )
    says(
        DataError,
        f"There is no folder {folder / 'masks'}: put images and their masks there.",
        lambda: segmentation_folder(folder, masks="masks"),
    )
    with pytest.raises(DataError, match=r"^The folder 'nowhere' of images and masks was not found"):
        segmentation_folder("nowhere")
    (folder / "label/3.png").unlink()
    says(
        DataError,
        f"{folder / 'image/3.png'} has no mask of that name in {folder / 'label'}: put one there, "
        "or remove the image.",
        lambda: segmentation_folder(folder),
    )
    draw(tmp_path / "one/image/a.png", noise(2, 2, 1))
    draw(tmp_path / "one/label/a.png", noise(2, 2, 1))
    says(
        DataError,
        f"{tmp_path / 'one/image'} has 1 images, of which 1 would be kept to judge by: put more "
        "images there.",
        lambda: segmentation_folder(tmp_path / "one"),
    )


def test_messages_about_files(folder):
    _, test = segmentation_folder(folder)
    draw(folder / "label/8.png", np.full((12, 16), 7))
    says(
        DataError,
        f"{folder / 'label/8.png'} has the value 7, which stands for no class: replace it or "
        "remove it.",
        lambda: test[0],
    )
    draw(folder / "label/8.png", np.zeros((12, 15)))
    says(
        DataError,
        f"{folder / 'label/8.png'} is a mask of 12 x 15 pixels for an image of 12 x 16: replace it "
        "or remove it.",
        lambda: test[0],
    )
    draw(folder / "image/8.png", np.zeros((12, 15)))
    says(
        DataError,
        f"{folder / 'image/9.png'} has another size than the others of its batch: pass a size to "
        "cut out of all of them.",
        lambda: list(loader(test, 2, shuffle=False)),
    )
    says(
        DataError,
        f"{folder / 'image/9.png'} is smaller than the 13 x 13 pixels to be cut out of it: replace "
        "it or remove it.",
        lambda: segmentation_folder(folder, size=13).test[1],
    )


def test_the_real_one(real):
    real(MEMBRANE)
    train, test = membrane(size=256)
    assert (len(train), len(test)) == (24, 6)
    (x, y), *_ = loader(train, 24)
    assert x.shape == (24, 1, 256, 256)
    assert float(x.mean()) == pytest.approx(0, abs=0.1)
    assert float(x.std()) == pytest.approx(1, abs=0.1)
    # Membranes (class 0) are thin and dark.
    assert 0.7 < float(y.double().mean()) < 0.85
    assert float(x[:, 0][y == 0].mean()) < float(x[:, 0][y == 1].mean()) - 0.8
    assert membrane().test[0][0].shape == (1, 512, 512)
