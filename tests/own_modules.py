"""Modules as other libraries write them: with a ``forward`` of their own, and no class of torch's
whose layer would stand for them."""

import torch
import torch.nn.functional as F
from torch import nn


class RootMeanSquare(nn.Module):
    """As Llama's and T5's."""

    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


class OnePlusWeight(nn.Module):
    """As Gemma's: the weight is what is added to 1."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.01) * (1 + self.weight)


class FunctionalNorm(nn.Module):
    """As nanoGPT's: a LayerNorm that may be without a bias."""

    def __init__(self, width, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class ChannelsNorm(nn.LayerNorm):
    """As ConvNeXt's: over the channels of images."""

    def forward(self, x):
        last = F.layer_norm(
            x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps
        )
        return last.permute(0, 3, 1, 2)


class Product(nn.Module):
    """As those of graph libraries: ``x W^T``, without torch's Linear."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.register_parameter("bias", None)

    def forward(self, x):
        return x @ self.weight.t()


class RightProduct(nn.Module):
    """A weight that is stored ``[inputs, outputs]``."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


class CastingLinear(nn.Linear):
    """Of torch's class, with a ``forward`` that computes the same."""

    def forward(self, x):
        return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


class StandardizedConv(nn.Conv2d):
    """Convolves with another weight than the one it has."""

    def forward(self, x):
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(x, weight, self.bias)


class SamePadding(nn.Conv2d):
    """Pads by what the size of the image needs."""

    def forward(self, x):
        pad = [(-(size - 1)) % self.stride[0] for size in x.shape[:-3:-1] for _ in (0, 1)]
        return super().forward(F.pad(x, pad))


class NormAndActivation(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()
