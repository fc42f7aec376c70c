"""A model, data and losses that tests name as module:function."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUMBER = 3


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def scaled() -> nn.Module:
    """With dropout, which evaluation mode turns off, and a norm."""
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3))


class Bare(nn.Module):
    """Parameters of its own, in no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, 5))
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x.unsqueeze(1) * self.scale).sum(2).tanh() + self.shift


def bare() -> nn.Module:
    return Bare()


def separable() -> list[tuple[Tensor, Tensor]]:
    """Two batches of unlike sizes, easy to learn."""
    x = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
    y = x[:, :3].argmax(1)
    return [(x[:20], y[:20]), (x[20:], y[20:])]


def empty() -> list[tuple[Tensor, Tensor]]:
    return []


def failing() -> None:
    raise OSError("the disk is gone")


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def total_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="sum")
