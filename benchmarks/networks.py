"""Networks the benchmarks train, in plain torch; weights start HeNormal, biases at zero.

>>> from benchmarks.networks import resnet32
>>> sum(p.numel() for p in resnet32().parameters())
464154
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from natgrad.lab import models
from natgrad.lab.models import he_normal_


def resnet20() -> nn.Module:
    return he_normal_(models.small_resnet(20))


def resnet32() -> nn.Module:
    return he_normal_(models.small_resnet(32))


def resnet50() -> nn.Module:
    return he_normal_(models.resnet(50))


def mlp() -> nn.Module:
    return he_normal_(models.mlp((784, 1024, 1024, 1024, 10)))


def linears(widths: Sequence[int]) -> nn.Module:
    return models.mlp(widths)


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
    return he_normal_(Encoder())


def digits_autoencoder() -> nn.Module:
    """64-128-64-16-64-128-64; reads and predicts 8x8 images `[n, 64]` (as logits)."""
    return models.autoencoder((64, 128, 64, 16))


def small_cnn(classes: int = 10) -> nn.Module:
    """Three convolutions (one of stride 2) and a linear head for 8x8 digits `[n, 1, 8, 8]`."""
    return he_normal_(
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
