"""Networks of linear layers."""

import torch
from torch import nn

from natgrad.lab.models import autoencoder, mlp


def shapes(model):
    return [(m.in_features, m.out_features) for m in model if isinstance(m, nn.Linear)]


def test_an_mlp_has_its_widths_and_a_linear_end():
    model = mlp((5, 7, 3))
    assert shapes(model) == [(5, 7), (7, 3)]
    assert isinstance(model[-1], nn.Linear)
    x = torch.randn(4, 5)
    torch.testing.assert_close(model(x), model[2](model[0](x).clamp(min=0)))


def test_an_autoencoder_goes_down_to_its_code_and_back():
    model = autoencoder((64, 128, 16))
    assert shapes(model) == [(64, 128), (128, 16), (16, 128), (128, 64)]
    assert sum(isinstance(m, nn.Tanh) for m in model) == 3
    assert isinstance(model[-1], nn.Linear)
    assert model(torch.randn(4, 64)).shape == (4, 64)


def test_an_autoencoder_starts_for_tanh():
    torch.manual_seed(0)
    model = autoencoder((1000, 600))
    expected = (2 / 1600) ** 0.5
    for layer in (model[0], model[2]):
        assert abs(layer.weight.std() / expected - 1) < 0.01
        assert not layer.bias.any()
