"""A model, data and losses that tests name as module:function."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

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


def in_another_precision() -> list[tuple[Tensor, Tensor]]:
    """Float64, with targets that are real numbers too."""
    return [(x.double(), x[:, :3].double()) for x, _ in separable()]


def shuffled() -> DataLoader[tuple[Tensor, ...]]:
    x = torch.zeros(6, 5, dtype=torch.float64)
    return DataLoader(TensorDataset(x, torch.zeros(6, dtype=torch.int64)), 3, shuffle=True)


def mappings() -> list[dict[str, Tensor]]:
    return [{"input": x.double(), "labels": y} for x, y in separable()]


def ragged() -> list[tuple[Tensor, Tensor]]:
    return [(torch.ones(2, n), torch.zeros(2)) for n in (3, 4)]


def empty() -> list[tuple[Tensor, Tensor]]:
    return []


def failing() -> None:
    raise OSError("the disk is gone")


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def total_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="sum")
