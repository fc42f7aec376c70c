"""Singular values and rows of layers against the dense matrix of what they do to a whole sample."""

from math import prod

import pytest
import torch
from torch import nn

from natgrad.measures import linear_maps, spectral_norm
from natgrad.measures.linear_maps import map_of
from unit.measures.brute_force import DTYPE, refuses


def conv(*args, d=2, **kwargs):
    return getattr(nn, f"Conv{d}d")(*args, dtype=DTYPE, **kwargs)


LAYERS = {
    "linear": (nn.Linear(5, 3, dtype=DTYPE), (5,)),
    "linear-tokens": (nn.Linear(5, 3, dtype=DTYPE), (4, 5)),
    "plain": (conv(2, 3, 3, padding=1), (2, 5, 4)),
    "unpadded": (conv(2, 3, 3), (2, 5, 4)),
    "stride": (conv(2, 3, 3, stride=2, padding=1), (2, 5, 6)),
    "dilation": (conv(2, 3, (3, 2), dilation=2, padding=2), (2, 5, 5)),
    "groups": (conv(4, 6, 3, groups=2, padding="same"), (4, 4, 4)),
    "circular": (conv(2, 3, 3, padding=1, padding_mode="circular"), (2, 4, 4)),
    "circular-twice": (conv(2, 3, 3, padding=1, padding_mode="circular"), (2, 2, 2)),
    "reflect": (conv(2, 3, 3, padding=1, padding_mode="reflect"), (2, 4, 4)),
    "replicate": (conv(2, 3, 3, padding=2, padding_mode="replicate"), (2, 4, 4)),
    "1d": (conv(2, 3, 3, d=1, padding=1), (2, 7)),
    "3d": (conv(2, 2, 2, d=3), (2, 3, 2, 3)),
    "transposed": (nn.ConvTranspose2d(2, 3, 3, 2, 1, 1, dtype=DTYPE), (2, 3, 3)),
    "transposed-groups": (
        nn.ConvTranspose2d(4, 6, 2, groups=2, dilation=2, dtype=DTYPE),
        (4, 2, 3),
    ),
    "transposed-1d": (nn.ConvTranspose1d(2, 3, 4, 2, dtype=DTYPE), (2, 5)),
}


def dense(layer, shape, scale=None, axis=0):
    """``[out, in]``, without the bias; with factors on the channels, which are on ``axis``."""
    size = prod(shape)
    with torch.no_grad():
        zero = layer(torch.zeros(1, *shape, dtype=DTYPE))
        columns = layer(torch.eye(size, dtype=DTYPE).view(size, *shape)) - zero
    if scale is not None:
        columns = (columns.movedim(axis + (axis >= 0), -1) * scale).movedim(-1, axis + (axis >= 0))
    return columns.flatten(1).T


@pytest.mark.parametrize("name", LAYERS)
class TestAgainstDenseMatrices:
    def test_the_largest_singular_value(self, name):
        layer, shape = LAYERS[name]
        found = spectral_norm(layer, shape)
        truth = float(torch.linalg.svdvals(dense(layer, shape))[0])
        assert float(found) == pytest.approx(truth, rel=1e-9)
        assert found.standard_error < 1e-5 * truth

    def test_rows(self, name, monkeypatch):
        layer, shape = LAYERS[name]
        truth = float(dense(layer, shape).norm(dim=1).sum())
        assert map_of(layer, shape).row_norms() == pytest.approx(truth, rel=1e-10)
        monkeypatch.setattr(linear_maps, "_AT_ONCE", 3 * prod(shape))
        assert map_of(layer, shape).row_norms() == pytest.approx(truth, rel=1e-10)

    def test_factors_on_outputs(self, name):
        layer, shape = LAYERS[name]
        linear = isinstance(layer, nn.Linear)
        channels = layer.out_features if linear else layer.out_channels
        scale = torch.randn(channels, dtype=DTYPE)
        found, truth = map_of(layer, shape, scale=scale), dense(layer, shape, scale, -linear)
        assert float(found.spectral_norm()) == pytest.approx(
            float(torch.linalg.svdvals(truth)[0]), rel=1e-10
        )
        assert found.row_norms() == pytest.approx(float(truth.norm(dim=1).sum()), rel=1e-10)


def test_a_convolution_is_not_its_kernel():
    """The norm of the kernel as a matrix is no bound on that of the convolution."""
    layer = conv(1, 1, 3, padding=1, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    kernel = float(torch.linalg.matrix_norm(layer.weight.detach().flatten(1), 2))
    assert kernel == pytest.approx(3.0)
    assert float(spectral_norm(layer, (1, 12, 12))) > 8.5


@pytest.mark.parametrize("stride", [1, 2])
def test_larger_images_by_lanczos(stride):
    layer = nn.Conv2d(2, 4, 3, stride, padding=1)
    found = spectral_norm(layer, (2, 16, 16))
    truth = float(torch.linalg.svdvals(dense(layer.double(), (2, 16, 16)))[0])
    assert float(found) == pytest.approx(truth, rel=1e-5)
    assert found.method.startswith("Lanczos")
    assert found.products < 250


def test_what_has_not_converged_says_so(monkeypatch):
    layer = conv(2, 2, 3, padding=1)
    real = linear_maps.lanczos.eigenpairs
    monkeypatch.setattr(
        linear_maps.lanczos, "eigenpairs", lambda *a, **k: real(*a, **{**k, "limit": 2})
    )
    found = spectral_norm(layer, (2, 12, 12))
    assert found.method.startswith("NOT converged")
    assert float(found) <= float(torch.linalg.svdvals(dense(layer, (2, 12, 12)))[0])


def test_refusals():
    for module in (nn.LayerNorm(3), nn.ReLU()):
        with refuses(
            f"{type(module).__name__} is no linear map that is known: give a Linear layer or a "
            "convolution."
        ):
            spectral_norm(module, (3,))
