"""Small networks and data that another library and natgrad are both given.

Batches are unequal: a library that averages the means of batches is off by 5 to 15% on them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES, BATCH, CLASSES = 13, 5, 3  # batches of 5, 5 and 3
Batches = list[tuple[Tensor, Tensor]]


def mlp(activation: type[nn.Module] = nn.Tanh) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), activation(), nn.Linear(5, CLASSES))


def conv_net() -> nn.Module:
    """Padding, stride and three layers, for images `[n, 1, 4, 4]`."""
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(2, 3, 2, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(12, CLASSES),
    )


def norm_net() -> nn.Module:
    """The same with a BatchNorm, which in evaluation mode is a fixed scale for each channel."""
    first, *rest = conv_net()
    return nn.Sequential(first, nn.BatchNorm2d(2), *rest)


@dataclass(frozen=True)
class Problem:
    """`name` is for test ids; inputs are `[n, *shape]`."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    regression: bool = False

    def __str__(self) -> str:
        return self.name

    def model(self, dtype: torch.dtype = torch.float64) -> nn.Module:
        """The same weights at every call, in evaluation mode, with running statistics that are
        neither zero nor one."""
        with torch.random.fork_rng():
            model = self.build().double()
            torch.manual_seed(1)  # what the layers have drawn depends on torch's default type
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(torch.randn_like(parameter) * 0.6)
                for buffer in model.buffers():
                    if buffer.is_floating_point():
                        buffer.uniform_(0.5, 1.5)
        return model.to(dtype).eval()

    @property
    def loss(self) -> nn.Module:
        return nn.MSELoss() if self.regression else nn.CrossEntropyLoss()

    def whole(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        """All data as one batch."""
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(SAMPLES, *self.shape, generator=generator, dtype=torch.float64)
        if self.regression:
            y = torch.randn(SAMPLES, CLASSES, generator=generator, dtype=torch.float64).to(dtype)
        else:
            y = torch.randint(CLASSES, (SAMPLES,), generator=generator)
        return x.to(dtype), y

    def batches(self, dtype: torch.dtype = torch.float64) -> Batches:
        x, y = self.whole(dtype)
        return list(zip(x.split(BATCH), y.split(BATCH), strict=True))

    def loader(self, dtype: torch.dtype = torch.float64) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(TensorDataset(*self.whole(dtype)), batch_size=BATCH)


MLP = Problem("mlp", mlp, (4,))
RELU = Problem("mlp with relu", lambda: mlp(nn.ReLU), (4,))
REGRESSION = Problem("mlp with a square loss", mlp, (4,), regression=True)
CONV = Problem("convolutions", conv_net, (1, 4, 4))
NORM = Problem("convolutions and norm", norm_net, (1, 4, 4))


def vectors(size: int, columns: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
    """`[size, columns]`, the same at every call."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(size, columns, generator=generator, dtype=torch.float64).to(dtype)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """For a library that makes tensors of torch's default type, whatever the model's is."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
