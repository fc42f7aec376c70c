"""Path norms against all paths of tiny networks, one by one, and against products of matrices."""

from itertools import product
from math import prod

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from natgrad.lab.models import small_resnet
from natgrad.measures import path_norm
from natgrad.operators import Problem
from unit.measures.brute_force import DTYPE, network, refuses

POWERS = [1.0, 2.0, 3.5]


def norm(model, shape, power):
    data = torch.randn(3, *shape, dtype=DTYPE), torch.zeros(3, dtype=torch.int64)
    return path_norm(model, None, data, power=power)


class TestEveryPath:
    @pytest.mark.parametrize("power", POWERS)
    @pytest.mark.parametrize("bias", [False, True])
    def test_of_a_small_network(self, power, bias):
        widths = (2, 3, 2, 2)
        model = network(*widths, activation=nn.ReLU, bias=bias)
        weights = [layer.weight.tolist() for layer in model[::2]]
        total = 0.0
        for path in product(*map(range, widths)):  # from an input to an output
            steps = zip(weights, path[1:], path, strict=False)
            total += prod(abs(w[after][before]) ** power for w, after, before in steps)
        for start in range(3 if bias else 0):  # from the bias of a layer to an output
            for path in product(*map(range, widths[start + 1 :])):
                first = abs(model[2 * start].bias[path[0]].item()) ** power
                steps = zip(weights[start + 1 :], path[1:], path, strict=False)
                total += first * prod(abs(w[a][b]) ** power for w, a, b in steps)
        assert norm(model, (2,), power) == pytest.approx(total ** (1 / power), rel=1e-12)

    def test_through_a_shortcut(self):
        class Shortcut(nn.Module):
            def __init__(self):
                super().__init__()
                self.one = nn.Linear(2, 2, bias=False, dtype=DTYPE)

            def forward(self, x):
                return x - 3 * F.relu(self.one(x))

        model = Shortcut()
        truth = 2 + 9 * float(model.one.weight.detach().square().sum())
        assert norm(model, (2,), 2.0) == pytest.approx(truth**0.5, rel=1e-12)


def matrix(module, shape):
    """Of a linear map, or of which inputs a maximum looks at, column by column: ``[out, in]``."""
    size = prod(shape)
    with torch.no_grad():
        zero = module(torch.zeros(1, *shape, dtype=DTYPE))
        columns = module(torch.eye(size, dtype=DTYPE).view(size, *shape)) - zero
    return columns.flatten(1).T, zero.flatten(), zero.shape[1:]


def through(modules, shape, power):
    """``v <- |A|^p v + |b|^p`` from ones."""
    v = torch.ones(prod(shape), dtype=DTYPE)
    for module in modules:
        if not isinstance(module, nn.ReLU | nn.LeakyReLU | nn.Dropout):
            A, b, shape = matrix(module, shape)
            v = A.abs() ** power @ v + b.abs() ** power
    return float(v.sum()) ** (1 / power)


def batch_norm(kind, channels):
    made = kind(channels, dtype=DTYPE).eval()
    with torch.no_grad():
        for p in (made.weight, made.bias, made.running_mean):
            p.copy_(torch.randn(channels))
        made.running_var.copy_(torch.rand(channels) + 0.5)
    return made


LAYERS = {
    "conv1d": (nn.Conv1d(2, 3, 3, padding=1, dtype=DTYPE), (2, 5)),
    "conv2d": (nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2, dtype=DTYPE), (2, 5, 4)),
    "conv2d-circular": (
        nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular", dtype=DTYPE),
        (2, 4, 4),
    ),
    "conv3d": (nn.Conv3d(1, 2, 2, dtype=DTYPE), (1, 3, 2, 3)),
    "transposed": (nn.ConvTranspose2d(2, 3, 3, stride=2, dtype=DTYPE), (2, 3, 2)),
    "batch-norm-1d": (batch_norm(nn.BatchNorm1d, 4), (4,)),
    "batch-norm-2d": (batch_norm(nn.BatchNorm2d, 3), (3, 2, 4)),
    "batch-norm-plain": (nn.BatchNorm2d(3, affine=False, dtype=DTYPE).eval(), (3, 2, 4)),
    "max-1d": (nn.MaxPool1d(2), (2, 6)),
    "max-2d": (nn.MaxPool2d(2), (2, 4, 6)),
    "max-2d-overlapping": (nn.MaxPool2d(3, 2, 1), (2, 5, 6)),
    "max-2d-dilated": (nn.MaxPool2d(2, 1, dilation=2), (1, 5, 6)),
    "max-2d-ceil": (nn.MaxPool2d((2, 3), 2, ceil_mode=True), (1, 5, 6)),
    "max-3d": (nn.MaxPool3d(2), (1, 4, 2, 2)),
    "average-1d": (nn.AvgPool1d(3, 2, 1), (2, 6)),
    "average-2d": (nn.AvgPool2d(2), (2, 4, 6)),
    "average-2d-padded": (nn.AvgPool2d(3, 2, 1), (1, 5, 5)),
    "average-2d-counted": (nn.AvgPool2d(3, 2, 1, count_include_pad=False), (1, 5, 5)),
    "average-2d-ceil": (nn.AvgPool2d(3, 2, 1, ceil_mode=True), (1, 6, 5)),
    "average-2d-divisor": (nn.AvgPool2d(2, divisor_override=3), (1, 4, 4)),
    "average-3d": (nn.AvgPool3d(2, 1), (1, 3, 2, 3)),
    "adaptive-average-1": (nn.AdaptiveAvgPool2d(1), (2, 4, 6)),
    "adaptive-average-uneven": (nn.AdaptiveAvgPool2d((2, 3)), (2, 5, 7)),
    "adaptive-average-1d": (nn.AdaptiveAvgPool1d(3), (2, 5)),
    "adaptive-max-uneven": (nn.AdaptiveMaxPool2d((2, 3)), (1, 5, 7)),
    "flatten": (nn.Flatten(), (2, 3)),
    "zero-pad": (nn.ZeroPad2d(1), (2, 3, 3)),
    "one-pad": (nn.ConstantPad1d(1, -2.0), (2, 3)),
}


class TestLayers:
    @pytest.mark.parametrize("power", POWERS)
    @pytest.mark.parametrize("name", LAYERS)
    def test_against_their_matrices(self, name, power):
        layer, shape = LAYERS[name]
        assert norm(layer, shape, power) == pytest.approx(through([layer], shape, power), rel=1e-10)

    @pytest.mark.parametrize("power", POWERS)
    def test_of_a_convolutional_network(self, power):
        modules = [
            nn.Conv2d(1, 2, 3, padding=1, dtype=DTYPE),
            batch_norm(nn.BatchNorm2d, 2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(2, 3, 3, padding=1, bias=False, dtype=DTYPE),
            nn.LeakyReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.5),
            nn.Linear(12, 2, dtype=DTYPE),
        ]
        model = nn.Sequential(*modules).eval()
        found = norm(model, (1, 6, 6), power)
        assert found == pytest.approx(through(modules, (1, 6, 6), power), rel=1e-10)


class TestFunctions:
    """Networks that call functions in place of modules."""

    def check(self, function, weights, truth):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.w = nn.Parameter(weights)

            def forward(self, x):
                return function(x, self.w)

        assert norm(Model(), (2, 3), 2.0) ** 2 == pytest.approx(truth, rel=1e-10)

    def test_means(self):
        self.check(lambda x, w: x.mean(2), torch.ones(1), 2 * 3 / 9)
        self.check(lambda x, w: torch.mean(x, dim=(1, 2), keepdim=True), torch.ones(1), 6 / 36)

    def test_weights_on_activations(self):
        w = torch.tensor([2.0, -3.0, 1.0], dtype=DTYPE)
        self.check(lambda x, w: w * x, w, 2 * 14)
        self.check(lambda x, w: x / w, w, 2 * (1 / 4 + 1 / 9 + 1))
        self.check(lambda x, w: w - x, w, 6 + 2 * 14)
        self.check(lambda x, w: torch.add(x, w, alpha=-2), w, 6 + 2 * 4 * 14)
        self.check(lambda x, w: x @ w, w, 2 * 14)
        self.check(lambda x, w: w[:2] @ x, w, 3 * 13)
        self.check(lambda x, w: 1 + 2 * x, w, 6 * 5)

    def test_weights_are_calculated_with_freely(self):
        w = torch.tensor([3.0, -4.0, 0.0], dtype=DTYPE)
        self.check(lambda x, w: x * (w / w.norm()).tanh().atanh(), w, 2 * 1.0)

    def test_shapes(self):
        w = torch.ones(1, dtype=DTYPE)

        def function(x, w):
            x = torch.cat([x.view(x.size(0), -1), x.permute(0, 2, 1).flatten(1)], 1)
            one, other = x.chunk(2, 1)
            y = torch.stack([one, other[:, :6]], 1).squeeze().unsqueeze(0)
            return torch.maximum(y, 2 * y).reshape(y.shape[0], -1)

        self.check(function, w, 12 * 5)


def test_of_a_residual_network_in_float32():
    model = small_resnet(8).eval()
    x = torch.randn(2, 3, 8, 8)
    found = path_norm(model, F.cross_entropy, (x, torch.zeros(2, dtype=torch.int64)))
    double = small_resnet(8).double().eval()
    double.load_state_dict(model.state_dict())
    assert found == pytest.approx(norm(double, (3, 8, 8), 2.0), rel=1e-6)
    assert found > 0


def test_does_not_see_how_layers_share_their_scale():
    model = network(4, 6, 3, activation=nn.ReLU)
    before = norm(model, (4,), 2.0)
    with torch.no_grad():
        model[0].weight.mul_(7)
        model[0].bias.mul_(7)
        model[2].weight.div_(7)
    assert norm(model, (4,), 2.0) == pytest.approx(before, rel=1e-10)


def test_bounds_the_outputs_change():
    model = network(4, 6, 1, activation=nn.ReLU, bias=False)
    x = torch.randn(500, 4, dtype=DTYPE)
    y = x + 0.1 * torch.rand_like(x)
    with torch.no_grad():
        change = (model(x) - model(y)).abs().squeeze(1)
    assert bool((change <= norm(model, (4,), 1.0) * (x - y).abs().amax(1)).all())


def test_leaves_the_model_alone_and_takes_a_problem():
    model = network(4, 3, activation=nn.ReLU)
    before = model[0].weight.detach().clone()
    x, y = torch.randn(5, 4, dtype=DTYPE), torch.zeros(5, dtype=torch.int64)
    problem = Problem(model, F.cross_entropy, (x, y))
    assert path_norm(problem) == norm(model, (4,), 2.0)
    assert torch.equal(model[0].weight, before)
    assert isinstance(model(x), torch.Tensor)
    assert type(model(x)) is torch.Tensor


class TestRefusals:
    def test_other_activations(self):
        with refuses(
            "The path norm is of networks of linear layers, ReLU, BatchNorm, pooling and sums, but "
            "the model calls tanh: measure a part of it without that."
        ):
            norm(network(2, 3, 2), (2,), 2.0)

    @pytest.mark.parametrize("module", [nn.GELU(), nn.Softmax(1), nn.LayerNorm(2, dtype=DTYPE)])
    def test_other_layers(self, module):
        name = {"GELU": "gelu", "Softmax": "softmax", "LayerNorm": "layer_norm"}
        with refuses(
            "The path norm is of networks of linear layers, ReLU, BatchNorm, pooling and sums, but "
            f"the model calls {name[type(module).__name__]}: measure a part of it without that."
        ):
            norm(module, (2,), 2.0)

    def test_products_of_activations(self):
        class Square(nn.Module):
            def forward(self, x):
                return x * x

        with refuses(
            "The path norm is of networks in which weights multiply activations, but the model "
            "multiplies two activations: measure a part of it without that."
        ):
            norm(Square(), (2,), 2.0)

    def test_quotients_of_activations(self):
        class Inverse(nn.Module):
            def forward(self, x):
                return 1 / x

        class Quotient(nn.Module):
            def forward(self, x):
                return torch.ones(2, dtype=DTYPE) / x

        for module in (Inverse(), Quotient()):
            with refuses(
                "The path norm is of networks in which weights multiply activations, but the model "
                "divides by an activation: measure a part of it without that."
            ):
                norm(module, (2,), 2.0)

    def test_statistics_of_the_batch(self):
        module = nn.BatchNorm1d(2, track_running_stats=False, dtype=DTYPE).eval()
        with refuses(
            "BatchNorm1d '' has no running statistics, so that it always mixes the samples of a "
            "batch: give it track_running_stats=True, or take a norm layer of single samples."
        ):
            norm(module, (2,), 2.0)

        class Function(nn.Module):
            def forward(self, x):
                return F.batch_norm(x, None, None)

        with refuses(
            "BatchNorm normalises by its batch, so that paths have no weights: call model.eval(), "
            "and let it keep running statistics."
        ):
            norm(Function(), (2,), 2.0)

    def test_training(self):
        with refuses(
            "BatchNorm1d '' is in training mode, in which it mixes the samples of a batch, so "
            "there is no loss of a single sample: call model.eval() first."
        ):
            norm(nn.BatchNorm1d(2, dtype=DTYPE), (2,), 2.0)

    def test_inputs(self):
        model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
        tokens, y = torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)
        with refuses(
            "The inputs are of type torch.int64, but the measure is of networks that take one "
            "floating-point tensor: measure the part of the model behind its embedding."
        ):
            path_norm(model, None, (tokens, y))
        with refuses(
            "The inputs are of type dict, but the measure is of networks that take one "
            "floating-point tensor: measure the part of the model behind its embedding."
        ):
            path_norm(model, None, {"x": torch.ones(2, 3), "labels": y})

    def test_outputs(self):
        class Pair(nn.Module):
            def forward(self, x):
                return x, x

        with refuses(
            "The model returned an object of type tuple, but a path norm is of the entries of one "
            "tensor: wrap it in a module that returns one."
        ):
            norm(Pair(), (2,), 2.0)

    def test_powers(self):
        with refuses("power is 0 but must be finite and above 0: pass such a number."):
            norm(nn.Identity(), (2,), 0)
