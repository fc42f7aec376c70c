"""Norms after rescaling, and which layers it is for."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from natgrad.errors import SettingError
from natgrad.lab.models.initial import he_normal_
from natgrad.lab.schemes import WeightRescaling, normalized_layers


def test_by_hand():
    """Eq. 18: √(2 · 2) / 5 of weights of norm 5."""
    layer = nn.Linear(1, 2, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[3.0], [4.0]]))
    WeightRescaling([layer]).step()
    scale = 2 / (5 + 1e-9)
    expected = torch.tensor([[3 * scale], [4 * scale]], dtype=torch.float64)
    torch.testing.assert_close(layer.weight.detach(), expected, rtol=1e-14, atol=0)
    with torch.no_grad():
        layer.weight.zero_()
    WeightRescaling([layer]).step()
    assert not layer.weight.any()


@pytest.mark.parametrize(
    ("layer", "outputs"),
    [
        (nn.Linear(3, 7), 7),
        (nn.Conv2d(4, 6, 3, groups=2), 6),
        (nn.ConvTranspose2d(4, 6, 3, groups=2), 6),
        (nn.Embedding(5, 3), 5),
        (nn.Conv1d(2, 5, 3).bfloat16(), 5),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value),
)
def test_norms(layer, outputs):
    bias = None if getattr(layer, "bias", None) is None else layer.bias.detach().clone()
    with torch.no_grad():
        layer.weight.mul_(10)
    WeightRescaling([layer]).step()
    found = float(layer.weight.detach().double().norm())
    tolerance = 1e-2 if layer.weight.dtype == torch.bfloat16 else 1e-6
    assert found == pytest.approx(math.sqrt(2 * outputs), rel=tolerance)
    if bias is not None:
        assert torch.equal(layer.bias, bias)


def test_the_norm_is_that_of_he_normal_weights():
    layer = he_normal_(nn.Conv2d(64, 128, 3))
    found = float(layer.weight.detach().norm())
    assert found == pytest.approx(math.sqrt(2 * 128), rel=0.02)


class Residual(nn.Module):
    """A pre-activated stem, of which the skip connection sees the output as well."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.inner = nn.Conv2d(4, 4, 3, padding=1)
        self.inner_norm = nn.BatchNorm2d(4)
        self.pooled = nn.Conv2d(4, 4, 3, padding=1)
        self.pooled_norm = nn.BatchNorm2d(4)
        self.side = nn.Linear(4, 6, bias=False)
        self.side_norm = nn.LayerNorm(6)
        self.biased = nn.Linear(4, 6)
        self.biased_norm = nn.LayerNorm(6)
        self.head = nn.Linear(12, 2)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.inner_norm(self.inner(F.relu(self.norm(x))))
        x = self.pooled_norm(F.avg_pool2d(self.pooled(x), 2)).mean((2, 3))
        sides = [self.side_norm(self.side(x)), self.biased_norm(input=self.biased(x))]
        return self.head(torch.cat(sides, 1))


def test_found():
    """Not those that go elsewhere, nor those with something in between or a bias that stays."""
    model = Residual()
    model.norm.eval()
    modes = [module.training for module in model.modules()]
    found = normalized_layers(model, torch.randn(2, 3, 8, 8))
    assert found == {"inner": model.inner, "side": model.side}
    assert [module.training for module in model.modules()] == modes
    assert not any(module._forward_hooks for module in model.modules())
    assert int(model.inner_norm.num_batches_tracked) == 0


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), (4, 3, 8, 8)),
        (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()), (8, 3)),
        (nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.GroupNorm(2, 4)), (4, 3, 8, 8)),
        (nn.Sequential(nn.Conv1d(3, 4, 3), nn.InstanceNorm1d(4)), (4, 3, 8)),
        (nn.Sequential(nn.Linear(3, 4, bias=False), nn.RMSNorm(4)), (8, 3)),
        (nn.Sequential(nn.ConvTranspose2d(3, 4, 3), nn.BatchNorm2d(4)), (4, 3, 8, 8)),
    ],
    ids=["batch", "linear", "group", "instance", "rms", "transposed"],
)
def test_what_is_found_does_not_change_what_is_computed(model, shape):
    model = model.double()
    x = torch.randn(shape, dtype=torch.float64)
    with torch.no_grad():
        model[0].weight.mul_(1000)  # far from the epsilon of the norm layer
        expected = model(x)
        (name, layer), *more = normalized_layers(model, x).items()
        assert (name, layer, more) == ("0", model[0], [])
        model[0].weight.mul_(100)
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)


class Tied(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.one, self.other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.norm = nn.LayerNorm(4)
        if tied:
            self.other.weight = self.one.weight

    def forward(self, x):
        return self.other(self.norm(self.one(x)))


def test_weights_that_are_also_somewhere_else():
    x = torch.randn(2, 4)
    assert list(normalized_layers(Tied(False), x)) == ["one"]
    with pytest.raises(SettingError):
        normalized_layers(Tied(True), x)


class Returned(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4, bias=False), nn.LayerNorm(4)

    def forward(self, x, also):
        y = self.layer(x)
        assert y.shape == x.shape  # is no use of the numbers
        return (self.norm(y), [y]) if also else self.norm(y)


def test_outputs_of_the_model_and_named_inputs():
    x = torch.randn(2, 4)
    assert list(normalized_layers(Returned(), x, also=False)) == ["layer"]
    with pytest.raises(SettingError):
        normalized_layers(Returned(), x, also=True)


def test_a_layer_that_is_called_twice():
    layer, norm = nn.Linear(4, 4, bias=False), nn.LayerNorm(4)
    assert list(normalized_layers(nn.Sequential(layer, norm, layer, norm), torch.randn(2, 4)))
    with pytest.raises(SettingError):
        normalized_layers(nn.Sequential(layer, norm, layer), torch.randn(2, 4))


def test_errors():
    with pytest.raises(SettingError) as error:
        WeightRescaling([])
    assert str(error.value) == (
        "WeightRescaling was given no layers and would do nothing: pass modules with a weight, "
        "such as normalized_layers(model, inputs).values()."
    )
    for wrong in (nn.BatchNorm2d(3), nn.ReLU(), weight_norm(nn.Linear(2, 2)), "conv"):
        with pytest.raises(SettingError) as error:
            WeightRescaling([wrong])
        assert str(error.value) == (
            f"WeightRescaling was given a {type(wrong).__name__} but needs modules with a weight "
            "matrix that is a parameter of its own: pass linear layers and convolutions."
        )
    with pytest.raises(SettingError, match=r"WeightRescaling.epsilon is -1 but must be finite and"):
        WeightRescaling([nn.Linear(2, 2)], epsilon=-1)
    for model in (nn.Linear(2, 2), nn.Sequential(weight_norm(nn.Linear(2, 2)), nn.LayerNorm(2))):
        with pytest.raises(SettingError) as error:
            normalized_layers(model, torch.randn(3, 2))
        assert str(error.value) == (
            f"No linear layer or convolution of this {type(model).__name__} is followed by a norm "
            "layer and by nothing else: choose the layers whose scale does not matter yourself."
        )


def test_a_model_that_fails_is_left_as_it_was():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(3))
    with pytest.raises(RuntimeError):
        normalized_layers(model, torch.randn(4, 2))
    assert model.training
    assert model[1].training
    assert not any(module._forward_hooks for module in model.modules())
