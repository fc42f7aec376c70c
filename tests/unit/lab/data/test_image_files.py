"""Image files: decoded, in their order, and said to be broken if they are."""

import sys

import numpy as np
import pytest
import torch

from natgrad.errors import DataError
from natgrad.lab.data import image_files
from unit.lab.data.error_text import says
from unit.lab.data.image_fixtures import Image, cut, draw, noise


def test_bytes_by_channel(tmp_path):
    numbers = noise(4, 6)
    found = image_files.tensor(image_files.opened(draw(tmp_path / "a.png", numbers)))
    assert found.shape == (3, 4, 6)
    assert torch.equal(found.permute(1, 2, 0), torch.from_numpy(numbers))
    gray = image_files.tensor(image_files.opened(draw(tmp_path / "b.png", noise(4, 6, 1))))
    assert gray.shape == (1, 4, 6)


@pytest.mark.parametrize("mode", ["L", "RGBA", "CMYK", "P", "1"])
def test_every_kind_becomes_what_is_asked_for(tmp_path, mode):
    path = tmp_path / ("a.tif" if mode == "CMYK" else "a.png")
    Image.fromarray(noise(4, 6)).convert(mode).save(path)
    assert image_files.tensor(image_files.opened(path, "RGB")).shape == (3, 4, 6)
    assert image_files.opened(path).mode == mode


def test_files_in_their_order(tmp_path):
    for name in ("10.png", "9.PNG", "a2.jpg", "a10.jpeg", "notes.txt", "b"):
        (tmp_path / name).write_bytes(b"")
    found = [path.name for path in image_files.within(tmp_path)]
    assert found == ["a2.jpg", "a10.jpeg", "9.PNG", "10.png"]


@pytest.mark.parametrize("ending", ["png", "jpg", "tif"])
def test_truncated(tmp_path, ending):
    path = draw(tmp_path / f"a.{ending}", noise(40, 60))
    cut(path, 2000)
    with pytest.raises(DataError) as caught:
        image_files.opened(path)
    message = str(caught.value)
    assert message.startswith(f"{path} is no image or is corrupt (")
    assert message.endswith("): replace it or remove it.")
    assert "\n" not in message


def test_no_image(tmp_path):
    path = tmp_path / "a.png"
    path.write_text("no image")
    says(
        DataError,
        f"{path} is no image or is corrupt (cannot identify image file {str(path)!r}): replace it "
        "or remove it.",
        lambda: image_files.opened(path),
    )
    says(
        DataError,
        f"There is no image {tmp_path / 'b.png'}: put it there, or leave it out.",
        lambda: image_files.opened(tmp_path / "b.png"),
    )


def test_an_image_that_would_fill_the_memory(tmp_path, monkeypatch):
    path = draw(tmp_path / "a.png", np.zeros((50, 50)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(DataError, match=r"a.png is no image or is corrupt \(Image size"):
        image_files.opened(path)


def test_without_pillow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    says(
        DataError,
        "Image files are read by Pillow, which is not installed: pip install 'natgrad[data]'.",
        lambda: image_files.opened(tmp_path / "a.png"),
    )
