"""U-Net has the published size, keeps the shape of images, and uses what it saw on the way."""

import pytest
import torch

from natgrad.errors import SettingError
from natgrad.lab.models import UNet


def size(model):
    return sum(parameter.numel() for parameter in model.parameters())


def test_it_has_the_published_size():
    """Of the network for brain images that KAISA trains."""
    with torch.device("meta"):
        assert size(UNet(3, 1, width=32, levels=4)) == 7_763_041


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_images_keep_their_shape(levels):
    model = UNet(2, 3, width=4, levels=levels)
    y = model(torch.randn(2, 2, 16, 24))
    assert y.shape == (2, 3, 16, 24)
    y.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_every_size_has_a_way_around_the_smaller_ones():
    model = UNet(1, 1, width=4, levels=2).eval()
    torch.nn.init.zeros_(model.up[-1].weight)  # nothing comes from below
    torch.nn.init.zeros_(model.up[-1].bias)
    x = torch.randn(1, 1, 8, 8)
    seen = model.down[0](x)
    expected = model.head(model.merge[-1](torch.cat((torch.zeros_like(seen), seen), 1)))
    torch.testing.assert_close(model(x), expected)


def test_sides_must_be_halved_often_enough():
    with pytest.raises(SettingError) as error:
        UNet(width=2, levels=3)(torch.zeros(1, 1, 16, 20))
    assert str(error.value) == (
        "A U-Net of 3 levels was given images of [16, 20] but needs sides that 8 divides: crop or "
        "pad them."
    )


def test_sizes_are_checked():
    with pytest.raises(SettingError) as error:
        UNet(width=0)
    assert str(error.value) == (
        "A U-Net has 1 inputs, 1 outputs, width 0 and 4 levels but each must be at least 1: pass "
        "such numbers."
    )
