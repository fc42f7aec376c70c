"""Networks the benchmarks train, in plain torch; weights start HeNormal, biases at zero.

>>> from benchmarks.networks import resnet32
>>> sum(p.numel() for p in resnet32().parameters())
464154
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def he_normal(network: nn.Module) -> nn.Module:
    """Weights ~ N(0, 2 / fan_in), biases zero; norm layers keep their ones and zeros."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return network


class PadShortcut(nn.Module):
    """He et al.'s option A: every second pixel, zeros for the new channels, no parameters."""

    def __init__(self, new_channels: int, stride: int) -> None:
        super().__init__()
        self.new_channels, self.stride = new_channels, stride

    def forward(self, x: Tensor) -> Tensor:
        """`[n, c, h, w]` -> `[n, c + new_channels, h / stride, w / stride]`."""
        x = x[:, :, :: self.stride, :: self.stride]
        before = self.new_channels // 2
        return F.pad(x, (0, 0, 0, 0, before, self.new_channels - before))


def projection(inputs: int, outputs: int, stride: int) -> nn.Module:
    """Option B: a 1x1 convolution with BatchNorm."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, project: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = (
                projection(inputs, outputs, stride)
                if project
                else PadShortcut(outputs - inputs, stride)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class Bottleneck(nn.Module):
    """The ResNet-50 block in its v1.5 form: the 3x3 convolution carries the stride."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = projection(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


def cifar_resnet(depth: int, classes: int = 10, project: bool = False) -> nn.Module:
    """He et al.'s residual network of `depth` = 6n + 2 layers for images `[n, 3, 32, 32]`."""
    if depth % 6 != 2:
        raise ValueError(f"A CIFAR residual network has 6n + 2 layers, not {depth}.")
    blocks: list[nn.Module] = []
    inputs = 16
    for width, first_stride in ((16, 1), (32, 2), (64, 2)):
        for index in range((depth - 2) // 6):
            blocks.append(BasicBlock(inputs, width, first_stride if index == 0 else 1, project))
            inputs = width
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes)]
    return he_normal(nn.Sequential(*stem, *blocks, *head))


def resnet20() -> nn.Module:
    return cifar_resnet(20)


def resnet32() -> nn.Module:
    return cifar_resnet(32)


def resnet50(classes: int = 1000) -> nn.Module:
    """The standard ResNet-50 v1.5 for images `[n, 3, 224, 224]`."""
    stem: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]
    blocks: list[nn.Module] = []
    inputs = 64
    for width, count, first_stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(count):
            blocks.append(Bottleneck(inputs, width, first_stride if index == 0 else 1))
            inputs = 4 * width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    return he_normal(nn.Sequential(*stem, *blocks, *head))


def mlp(widths: Sequence[int] = (784, 1024, 1024, 1024, 10)) -> nn.Module:
    """Linear layers of these widths with ReLU between them, for rows `[n, widths[0]]`."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return he_normal(nn.Sequential(*layers[:-1]))


class EncoderLayer(nn.Module):
    """Pre-norm self-attention and feed-forward; q, k and v are three Linear on one input."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """`[n, tokens, width]` -> the same shape."""
        y = self.norm1(x)
        query, key, value = (
            project(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = F.gelu(self.widen(self.norm2(x)))
        z: Tensor = x + self.narrow(y)
        return z


class Encoder(nn.Module):
    """A transformer encoder over already embedded tokens, classified by their mean."""

    def __init__(
        self, layers: int = 4, width: int = 256, heads: int = 4, hidden: int = 1024
    ) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(EncoderLayer(width, heads, hidden) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """`[n, tokens, width]` -> logits `[n, 10]`."""
        logits: Tensor = self.head(self.norm(self.layers(x)).mean(1))
        return logits


def encoder() -> nn.Module:
    return he_normal(Encoder())


def digits_autoencoder() -> nn.Module:
    """64-128-64-16-64-128-64 with tanh; reads and predicts 8x8 images `[n, 64]` (as logits)."""
    widths = (64, 128, 64, 16, 64, 128, 64)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        linear = nn.Linear(inputs, outputs)
        nn.init.xavier_normal_(linear.weight)  # He's factor 2 belongs to ReLU, not to tanh
        nn.init.zeros_(linear.bias)
        layers += [linear, nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def small_cnn(classes: int = 10) -> nn.Module:
    """Three convolutions (one of stride 2) and a linear head for 8x8 digits `[n, 1, 8, 8]`."""
    return he_normal(
        nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(512, classes),
        )
    )


def tiny_stack(layers: int = 200, width: int = 8) -> nn.Module:
    """A deep stack of tiny Linear layers, whose time is nearly all Python and dispatch."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
