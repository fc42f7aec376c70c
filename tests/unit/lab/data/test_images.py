"""Images in memory: normalised, shifted and mirrored."""

import numpy as np
import pytest
import torch

from natgrad.errors import SettingError
from natgrad.lab.data import Images, Normalise, Shift, loader
from natgrad.lab.data.random_numbers import uniform
from unit.lab.data.error_text import says


def images(count=6, channels=3, height=5, width=7):
    return torch.randint(256, (count, channels, height, width), dtype=torch.uint8)


def shifted(image, padding, top, left, flip):
    """Slow and obviously right."""
    _, height, width = image.shape
    out = torch.zeros_like(image)
    for y in range(height):
        for x in range(width):
            from_y, from_x = y + top - padding, (width - 1 - x if flip else x) + left - padding
            if 0 <= from_y < height and 0 <= from_x < width:
                out[:, y, x] = image[:, from_y, from_x]
    return out


@pytest.mark.parametrize("flip", [False, True])
def test_shift(flip):
    given = images()
    chances = np.random.default_rng(0).random((6, 3))
    found = Shift(padding=2, flip=flip)(given, chances)
    for image, cut, (u, v, w) in zip(given, found, chances, strict=True):
        mirrored = flip and w < 0.5
        assert torch.equal(cut, shifted(image, 2, int(u * 5), int(v * 5), mirrored))


def test_every_shift_is_as_likely():
    """An image of one bright pixel shows where it went."""
    given = torch.zeros(36_000, 1, 3, 3, dtype=torch.uint8)
    given[:, :, 1, 1] = 1
    found = Shift(padding=1)(given, uniform(0, 0, np.arange(36_000), 3))
    # Four standard deviations of a count.
    assert found.sum(0).flatten().tolist() == pytest.approx([4000] * 9, abs=240)


def test_normalise():
    given = images(channels=2)
    found = Normalise((0.5, 0.25), (0.1, 0.2))(given)
    for channel, (mean, deviation) in enumerate(((0.5, 0.1), (0.25, 0.2))):
        expected = (given[:, channel].double() / 255 - mean) / deviation
        torch.testing.assert_close(found[:, channel].double(), expected, rtol=0, atol=1e-5)
    assert found.dtype == torch.float32
    mean = torch.rand(2, 5, 7)
    found = Normalise(mean, (1.0, 1.0))(given)
    torch.testing.assert_close(found, given / 255 - mean)
    assert torch.equal(Normalise(mean, (1.0, 1.0)).unit()(given), given / 255)


def test_batches_are_augmented_and_the_whole_is_not():
    data = Images(images(), torch.arange(6), ("a",) * 6, Normalise((0.0,) * 3, (1.0,) * 3))
    plain, labels = data.tensors()
    ((x, y),) = loader(data, 6)
    assert torch.equal(x, plain[y])
    more = data.augmented()
    ((x, y),) = loader(more, 6)
    assert sorted(y.tolist()) == labels.tolist()
    assert not torch.equal(x, plain[y])
    assert torch.equal(more.tensors()[0], plain)
    ((x, y),) = loader(data.augmented(Shift(padding=0, flip=False)), 6)
    assert torch.equal(x, plain[y])


def test_messages():
    says(
        SettingError,
        "The mean is of 1 channels but the images have 3: pass a Normalise with a number for each "
        "channel.",
        lambda: Normalise((0.0,), (1.0,))(images()),
    )
