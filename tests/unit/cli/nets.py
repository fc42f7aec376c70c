"""Networks that tests name as module:function."""

import torch
from torch import Tensor, nn

NUMBER = 3


class Shared(nn.Module):
    """Two layers on one input, and sizes that three ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 7)
        self.left, self.right = nn.Linear(7, 4), nn.Linear(7, 4, bias=False)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x).tanh()
        return self.norm(self.left(y) * self.right(y))


class Reads(nn.Module):
    """Reads numbers while it is built, which is impossible without any."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = float(torch.ones(2).sum())
        self.layer = nn.Linear(3, 2)


class Holder:
    @staticmethod
    def inner() -> nn.Module:
        return Shared()


def with_argument(width: int) -> nn.Module:
    return nn.Linear(width, 1)


def no_network() -> int:
    return 3
