"""The small convolutional network, for the sizes of images that it is made for."""

import pytest
import torch
from torch import nn

from natgrad.lab.models import convnet


@pytest.mark.parametrize(
    ("image", "left"), [((1, 28, 28), 7 * 7), ((1, 8, 8), 2 * 2), ((3, 9, 12), 2 * 3)]
)
@pytest.mark.parametrize("batch_norm", [False, True])
def test_sizes(image, left, batch_norm):
    model = convnet(image, channels=(4, 6), classes=5, batch_norm=batch_norm)
    assert model(torch.randn(2, *image)).shape == (2, 5)
    one, two = (2 * 4, 2 * 6) if batch_norm else (4, 6)  # of norms, or biases
    expected = 9 * image[0] * 4 + one + 9 * 4 * 6 + two + (6 * left + 1) * 5
    assert sum(p.numel() for p in model.parameters()) == expected


def test_layers_follow_each_other():
    half = [nn.Conv2d, nn.ReLU, nn.MaxPool2d]
    assert [type(m) for m in convnet()] == [*half, *half, nn.Flatten, nn.Linear]
    half.insert(1, nn.BatchNorm2d)
    assert [type(m) for m in convnet(batch_norm=True)] == [*half, *half, nn.Flatten, nn.Linear]
