"""Residual networks, ``x <- relu(f(x) + shortcut(x))``, for any images (He et al. 2016)."""

import torch.nn.functional as F
from torch import Tensor, nn

from natgrad.errors import SettingError

# Blocks of each of the four stages, and whether they are bottlenecks.
DEPTHS = {
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
    152: ((3, 8, 36, 3), True),
}


class Residual(nn.Module):
    """``relu(branch(x) + shortcut(x))``, with a BatchNorm behind every convolution.

    Arguments:
        inputs: channels of the input.
        width: channels of the branch; a bottleneck's output has four times as many.
        stride: of the branch's 3x3 convolution (of the first of two): 2 halves the image's sides.
        bottleneck: whether the branch is 1x1, 3x3 and 1x1 convolutions instead of two of 3x3.
        project: whether the shortcut to another shape is a 1x1 convolution with a norm; otherwise
            it takes every ``stride``-th pixel and fills new channels with zeros, without
            parameters.
    """

    def __init__(
        self,
        inputs: int,
        width: int,
        stride: int,
        *,
        bottleneck: bool = False,
        project: bool = True,
    ) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        # A bottleneck's 3x3 convolution has the stride (v1.5), so that no pixel is skipped.
        first, second = ((1, 1), (3, stride)) if bottleneck else ((3, stride), (3, 1))
        self.conv1, self.norm1 = _convolution(inputs, width, *first)
        self.conv2, self.norm2 = _convolution(width, width, *second)
        if bottleneck:
            self.conv3, self.norm3 = _convolution(width, outputs, 1, 1)
        self.bottleneck = bottleneck
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = (
                nn.Sequential(*_convolution(inputs, outputs, 1, stride))
                if project
                else Padded(outputs - inputs, stride)
            )

    def forward(self, x: Tensor) -> Tensor:
        """``[n, outputs, h / stride, w / stride]``.

        Arguments:
            x: ``[n, inputs, h, w]``.
        """
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        if self.bottleneck:
            y = self.norm3(self.conv3(F.relu(y)))
        return F.relu(y + self.shortcut(x))


class Padded(nn.Module):
    """A shortcut without parameters: every ``stride``-th pixel, and zeros for new channels."""

    def __init__(self, new_channels: int, stride: int) -> None:
        super().__init__()
        self.new_channels, self.stride = new_channels, stride

    def forward(self, x: Tensor) -> Tensor:
        """``[n, c, h, w]`` -> ``[n, c + new_channels, h / stride, w / stride]``"""
        before = self.new_channels // 2
        after = self.new_channels - before
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, after))


def resnet(depth: int, classes: int = 1000) -> nn.Sequential:
    """ResNet-18 to ResNet-152 for ImageNet, ``[n, 3, 224, 224] -> [n, classes]``.

    Arguments:
        depth: 18, 34, 50, 101 or 152; from 50 on with bottlenecks.
        classes: number of outputs.
    """
    if depth not in DEPTHS:
        raise SettingError(
            f"There is no ResNet of depth {depth!r} for images of 224 x 224: pass one of "
            f"{', '.join(map(str, DEPTHS))}, or use small_resnet()."
        )
    counts, bottleneck = DEPTHS[depth]
    layers = [*_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for stage, count in enumerate(counts):
        for index in range(count):
            stride = 2 if stage and not index else 1
            layers.append(Residual(inputs, 64 << stage, stride, bottleneck=bottleneck))
            inputs = (256 if bottleneck else 64) << stage
    return nn.Sequential(*layers, *_head(inputs, classes))


def small_resnet(depth: int, classes: int = 10, *, project: bool = False) -> nn.Sequential:
    """A ResNet for CIFAR, ``[n, 3, 32, 32] -> [n, classes]``.

    Arguments:
        depth: 6k + 2 layers, at least 8, such as 20, 32, 56 or 110.
        classes: number of outputs.
        project: whether shortcuts to another shape are 1x1 convolutions; otherwise they have no
            parameters, as in the paper.
    """
    if depth < 8 or depth % 6 != 2:
        raise SettingError(
            f"A ResNet for images of 32 x 32 has 6n + 2 layers and not {depth!r}: pass a depth "
            "such as 20, 32, 56 or 110."
        )
    layers = [*_convolution(3, 16, 3, 1), nn.ReLU()]
    inputs = 16
    for width in (16, 32, 64):
        for _ in range((depth - 2) // 6):
            layers.append(Residual(inputs, width, 1 if inputs == width else 2, project=project))
            inputs = width
    return nn.Sequential(*layers, *_head(inputs, classes))


def _convolution(
    inputs: int, outputs: int, kernel: int, stride: int
) -> tuple[nn.Module, nn.Module]:
    """And its norm, which makes a bias superfluous."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(outputs)


def _head(inputs: int, classes: int) -> tuple[nn.Module, ...]:
    return nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)
