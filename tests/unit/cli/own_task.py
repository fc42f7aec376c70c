"""A model, data, a loss and optimizers of a user's, which tests name as module:function."""

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from natgrad.lab.models.by_name import TaskShapes
from natgrad.lab.schemes.optimizers_by_name import NamedOptimizer

NUMBER = 3


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def build_for(shapes: TaskShapes) -> nn.Module:
    return nn.Linear(shapes.inputs[0], shapes.classes)


def one_output() -> nn.Module:
    return nn.Linear(6, 1)


def build_from_two(first: int, second: int) -> nn.Module:
    return nn.Linear(first, second)


def _points(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points in six dimensions, with one of three classes by their first three numbers."""
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
    return inputs, inputs[:, :3].argmax(1).to(torch.int32)


def tensors():
    return _points(192, 0), _points(48, 1)


def numbers():
    """Real targets."""
    pairs = tensors()
    return tuple((inputs, inputs.sum(1, keepdim=True)) for inputs, _ in pairs)


class Noisy(Dataset):
    """Every sample has noise of its own, drawn from torch's global numbers."""

    classes = ("left", "middle", "right")

    def __init__(self, count: int, seed: int) -> None:
        self.inputs, self.targets = _points(count, seed)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.inputs[row] + 0.1 * torch.randn(6), int(self.targets[row])


def datasets():
    return Noisy(192, 0), DataLoader(Noisy(48, 1), batch_size=5)


def unlabelled():
    """Without a number of classes."""
    samples = [(x, int(y)) for x, y in zip(*_points(64, 0), strict=True)]
    return samples, samples


def one_data_set():
    return torch.zeros(3)


def uneven():
    return (torch.zeros(4, 6), torch.zeros(3)), _points(8, 0)


def none_at_all():
    return (torch.zeros(0, 6), torch.zeros(0)), _points(8, 0)


def single_values():
    return [torch.zeros(6)] * 8, [torch.zeros(6)] * 8


def missing_disk():
    raise OSError("the disk is gone")


def square(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).sum(1).mean()


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target) ** 2


class Signs(Optimizer):
    """w ← w - lr (sign(m) + decay w), m the average of gradients."""

    def __init__(self, params, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 0.1)
                p.sub_(mean.sign() + group["weight_decay"] * p, alpha=group["lr"])


def light_sgd(params, rate) -> Optimizer:
    return torch.optim.SGD(params, lr=rate, momentum=0.5)


NAMED = NamedOptimizer("Signs, named", "averages of 10", lambda asked: Signs(asked.params), lr=0.5)


def no_optimizer(params, lr) -> int:
    return 3
