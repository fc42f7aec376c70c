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


class InplaceActivation(nn.Conv2d):
    """Works in place on what its convolution gives."""

    def __init__(self, outputs, inputs):
        super().__init__(inputs, outputs, 2)

    def forward(self, x):
        return F.relu_(super().forward(x))


class ScaledStandardizedConv(nn.Conv2d):
    """As timm's: rows without their mean and with a variance of 1, times a gain."""

    def __init__(self, inputs, outputs, kernel):
        super().__init__(inputs, outputs, kernel)
        self.gain = nn.Parameter(torch.ones(outputs, 1, 1, 1))

    def forward(self, x):
        rows = self.weight.reshape(1, self.out_channels, -1)
        scale = (self.gain * self.weight[0].numel() ** -0.5).view(-1)
        weight = F.batch_norm(rows, None, None, weight=scale, training=True, eps=1e-6)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias, self.stride)


class SquaredLinear(nn.Linear):
    """Multiplies by another weight than the one it has."""

    def forward(self, x):
        return F.linear(x, self.weight.square(), self.bias)


class ScaledEmbedding(nn.Embedding):
    """As BART's and Gemma's: what it looks up is multiplied by a number."""

    def forward(self, x):
        return super().forward(x) * 3.0


class LayerScale(nn.Module):
    """As timm's, over the last axis; with ``space`` over channels."""

    def __init__(self, width, space=()):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width, *space))

    def forward(self, x):
        return x.mul(self.gamma)


class Router(nn.Module):
    """As Mixtral's and GPT-OSS's: logits, the scores of the experts that are taken, and which."""

    def __init__(self, width, experts, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, width))
        self.bias = nn.Parameter(torch.randn(experts)) if bias else None

    def forward(self, x):
        logits = F.linear(x.reshape(-1, x.shape[-1]), self.weight, self.bias)
        scores, taken = torch.topk(logits.softmax(-1), 2, dim=-1)
        scores /= scores.sum(-1, keepdim=True)
        return logits, scores, taken


class RouterWithScale(Router):
    """The weight enters a second time."""

    def forward(self, x):
        logits, scores, taken = super().forward(x)
        return logits * self.weight.norm(dim=1), scores, taken
