"""Random erasing: what a rectangle is, and the statistics of many of them."""

import numpy as np
import pytest
import torch

from natgrad.errors import SettingError
from natgrad.lab.schemes import RandomErasing

SIDE = 224
MANY = 20_000


def rectangles(n=MANY, height=SIDE, width=SIDE, seed=0, **settings):
    erasing = RandomErasing(generator=torch.Generator().manual_seed(seed), **settings)
    top, bottom, left, right = erasing.rectangles(n, height, width)
    return top, bottom - top, left, right - left


def assert_mean(values, expected, deviation, rounding=0.0):
    """Within four standard errors of the mean, and what whole pixels do to it."""
    assert abs(np.mean(values) - expected) < 4 * deviation / np.sqrt(len(values)) + rounding


@pytest.mark.parametrize("probability", [0.5, 0.1])
def test_how_many_are_erased(probability):
    _, tall, _, _ = rectangles(probability=probability)
    assert_mean(tall > 0, probability, np.sqrt(probability * (1 - probability)))


def test_none_and_all():
    images = torch.randn(50, 3, 16, 16)
    assert torch.equal(RandomErasing(probability=0.0)(images), images)
    erased = RandomErasing(probability=1.0)(images) == 0
    assert erased.flatten(1).any(1).all()


def test_areas_are_uniform():
    _, tall, _, wide = rectangles(probability=1.0)
    part = tall * wide / SIDE**2
    # Rounding moves an area by at most half a pixel a side.
    assert part.min() > 0.0195
    assert part.max() < 0.2525
    assert_mean(part, 0.135, 0.23 / np.sqrt(12))
    for quantile in (0.25, 0.5, 0.75):
        below = part < 0.02 + 0.23 * quantile
        assert_mean(below, quantile, np.sqrt(quantile * (1 - quantile)))


def test_aspects_are_uniform_and_swapped_half_of_the_time():
    _, tall, _, wide = rectangles(probability=1.0, area=(0.2, 0.25))
    upright = tall > wide
    assert_mean(upright[tall != wide], 0.5, 0.5)
    aspect = np.minimum(tall, wide) / np.maximum(tall, wide)
    assert aspect.min() > 0.29
    assert_mean(aspect, 0.65, 0.7 / np.sqrt(12), rounding=0.002)
    for quantile in (0.25, 0.5, 0.75):
        below = aspect < 0.3 + 0.7 * quantile
        assert_mean(below, quantile, np.sqrt(quantile * (1 - quantile)), rounding=0.005)


def test_places_are_uniform_within_the_image():
    top, tall, left, wide = rectangles(probability=1.0)
    assert top.min() == left.min() == 0
    assert (top + tall).max() == (left + wide).max() == SIDE
    for start, size in ((top, tall), (left, wide)):
        assert (start + size <= SIDE).all()
        assert_mean((start + 0.5) / (SIDE - size + 1), 0.5, 1 / np.sqrt(12))


def test_draws_are_independent():
    top, tall, left, wide = rectangles(probability=1.0)
    place = (top + 0.5) / (SIDE - tall + 1)
    other = (left + 0.5) / (SIDE - wide + 1)
    for one, two in ((place, other), (place, tall * wide), (tall * wide, tall / wide)):
        assert abs(np.corrcoef(one, two)[0, 1]) < 4 / np.sqrt(MANY)


def test_pixels():
    """All channels of the rectangle are zero, and nothing else has changed."""
    erasing = RandomErasing(generator=torch.Generator().manual_seed(1))
    images = torch.rand(40, 3, 20, 30) + 1
    before = images.clone()
    found = erasing(images)
    assert torch.equal(images, before)
    again = RandomErasing(generator=torch.Generator().manual_seed(1))
    for image, original, (top, bottom, left, right) in zip(
        found, images, again.rectangles(40, 20, 30).T, strict=True
    ):
        expected = original.clone()
        expected[:, top:bottom, left:right] = 0
        assert torch.equal(image, expected)


def test_one_image_and_other_dtypes():
    image = torch.randint(1, 255, (1, 12, 12), dtype=torch.uint8)
    erasing = RandomErasing(1.0, (0.25, 0.25), (1.0, 1.0))
    found = erasing(image)
    assert found.shape == image.shape
    assert found.dtype == torch.uint8
    assert (found == 0).sum() == 36
    assert RandomErasing(1.0)(torch.zeros(0, 3, 4, 4)).shape == (0, 3, 4, 4)


@pytest.mark.parametrize(("height", "width"), [(4, 100), (100, 4)])
def test_a_long_image(height, width):
    top, tall, left, wide = rectangles(1000, height, width, probability=1.0)
    assert min(tall.max(), wide.max()) == 4
    assert min(tall.min(), wide.min()) >= 1
    assert ((top + tall <= height) & (left + wide <= width)).all()
    assert min(top.min(), left.min()) == 0


def test_torch_seeds_it_by_default():
    images, found = torch.ones(20, 1, 8, 8), []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(RandomErasing()(images))
    assert torch.equal(*found)
    assert not torch.equal(found[0], RandomErasing()(images))


def test_errors():
    with pytest.raises(SettingError, match=r"RandomErasing.probability is 1.1 but must be in \[0,"):
        RandomErasing(1.1)
    with pytest.raises(SettingError) as error:
        RandomErasing(area=0.1)
    assert str(error.value) == (
        "RandomErasing.area is 0.1 but must be two numbers: pass the smallest and the largest."
    )
    with pytest.raises(SettingError) as error:
        RandomErasing(aspect=(0.0, 1.0))
    assert str(error.value) == (
        "The smallest RandomErasing.aspect is 0.0 but must be in (0, 1]: pass such a number."
    )
    with pytest.raises(SettingError, match=r"The largest RandomErasing.area is 1.5 but must be"):
        RandomErasing(area=(0.1, 1.5))
    with pytest.raises(SettingError) as error:
        RandomErasing(area=(0.3, 0.2))
    assert str(error.value) == (
        "RandomErasing.area is (0.3, 0.2) but must not fall: pass the smaller of the two first."
    )
    with pytest.raises(SettingError) as error:
        RandomErasing()(torch.zeros(4, 4))
    assert str(error.value) == (
        "images are of shape [4, 4] but must be [n, channels, H, W], or [channels, H, W] for one "
        "of them: reshape them."
    )
