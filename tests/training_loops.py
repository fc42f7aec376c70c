"""Small networks with their data, and the training step that tests of whole runs share."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import natgrad
from natgrad import KFAC
from natgrad.inverses import Diagonalization

CLASSES = 3


class Attention(nn.Module):
    """Query, key and value see the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x)[0].mean(1))


class Tied(nn.Module):
    """An embedding whose weight is also that of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.hidden = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(self.embedding(tokens)).tanh()).mean(1)


class Twice(nn.Module):
    """One module, called two times."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.shared = nn.Linear(5, 5)
        self.last = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.shared(self.shared(self.first(x).tanh()).tanh()).tanh())


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 3, 3, stride=2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(12, CLASSES),
    )


@dataclass(frozen=True)
class Net:
    build: Callable[[], nn.Module]
    sample: Callable[[int], Tensor]

    def batch(self, n: int = 16, seed: int = 1) -> tuple[Tensor, Tensor]:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.sample(n), torch.randint(CLASSES, (n,))

    def batches(self, count: int, n: int = 16) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.batch(n, seed) for seed in range(count))

    def model(self, seed: int = 0) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.build()


NETS = {
    "mlp": Net(mlp, lambda n: torch.randn(n, 4)),
    "cnn": Net(cnn, lambda n: torch.randn(n, 2, 6, 6)),
    "attention": Net(Attention, lambda n: torch.randn(n, 5, 6)),
    "tied": Net(Tied, lambda n: torch.randint(7, (n, 4))),
    "twice": Net(Twice, lambda n: torch.randn(n, 4)),
}
MLP = NETS["mlp"]


def often(**settings: Any) -> dict[str, Any]:
    """Settings under which every step updates and refreshes."""
    return {"update_every": 1, "refresh_every": 1, "damping": 1e-2, **settings}


def start(net: Net = MLP, lr: float = 0.1, **settings: Any) -> tuple[nn.Module, Optimizer, KFAC]:
    """A new model with its optimizer and preconditioner, updated at every step unless told."""
    model = net.model()
    optimizer = SGD(model.parameters(), lr=lr, momentum=0.9)
    return model, optimizer, KFAC(model, optimizer, **often(**settings))


def backward(model: nn.Module, optimizer: Optimizer, kfac: KFAC, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    out = model(x)
    kfac.observe(out)
    loss = F.cross_entropy(out, y)
    loss.backward()
    return loss


def train(
    model: nn.Module, optimizer: Optimizer, kfac: KFAC, batches: Iterable[tuple[Tensor, Tensor]]
) -> list[float]:
    """The losses, each before its step."""
    losses = []
    for x, y in batches:
        losses.append(float(backward(model, optimizer, kfac, x, y).detach()))
        kfac.step()
        optimizer.step()
    return losses


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def factors(kfac: KFAC) -> dict[str, Tensor]:
    """The running averages as dense matrices, by block and factor."""
    return {
        f"{block.name}.{name}": block.forms[name].dense(running.mean.float()).clone()
        for block in kfac.blocks
        for name, running in block.running.items()
    }


def assert_close(one: Any, other: Any, tolerance: float = 1e-5) -> None:
    """Two lists or dictionaries of tensors, each compared relative to its largest entry."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        one, other = list(one.values()), [other[key] for key in one]
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        scale = float(b.abs().max()) if b.numel() else 1.0
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * max(scale, 1e-6))


def assert_equal(one: Any, other: Any, where: str = "") -> None:
    """Two nested states, bit by bit; ``where`` is said of what differs."""
    if isinstance(one, Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_equal(one[key], other[key], f"{where} {key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b, where)
    else:
        assert one == other, where


def hooks(model: nn.Module) -> int:
    """How many hooks there are on all modules of a model."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


STRUCTURES = [
    natgrad.Kronecker(),
    natgrad.Kronecker(sharing="reduce"),
    natgrad.EKFAC(),
    natgrad.UnitWise(),
    natgrad.Diagonal(),
    natgrad.Full(),
]
INVERSES = [natgrad.Eigen(), natgrad.Cholesky()]
CHOICES = [
    (structure, inverse)
    for structure in STRUCTURES
    for inverse in INVERSES
    if isinstance(inverse, Diagonalization) or not isinstance(structure, natgrad.EKFAC)
]
