"""HeNormal: variances of 2 / fan_in, biases of zero, and nothing else is touched."""

import pytest
import torch
from torch import nn

from natgrad.lab.models import he_normal_


@pytest.mark.parametrize(
    ("layer", "fan_in"),
    [
        (lambda: nn.Linear(300, 500), 300),
        (lambda: nn.Conv1d(60, 200, 5), 300),
        (lambda: nn.Conv2d(40, 200, 3, bias=False), 360),
        (lambda: nn.Conv2d(80, 200, 3, groups=2), 360),
        (lambda: nn.Conv3d(12, 200, 3), 324),
    ],
)
def test_variance(layer, fan_in):
    torch.manual_seed(0)
    module = nn.Sequential(layer())
    assert he_normal_(module) is module
    weight = module[0].weight
    assert abs(weight.var() * fan_in / 2 - 1) < 0.03
    assert abs((weight**4).mean() / weight.var() ** 2 - 3) < 0.1  # as of a normal distribution
    assert module[0].bias is None or not module[0].bias.any()


def test_other_parameters_stay():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Embedding(5, 4), nn.PReLU())
    before = [p.clone() for p in model.parameters()]
    for p, old in zip(he_normal_(model).parameters(), before, strict=True):
        assert torch.equal(p, old)
