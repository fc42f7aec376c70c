"""What is timed: networks with inputs of a fixed size, and one training step of each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

import natgrad
from benchmarks import networks
from benchmarks.naive import NaiveKFAC
from benchmarks.timing import Times

NEVER = 10**9
INTERVALS = {"stale": (NEVER, NEVER), "update": (1, NEVER), "both": (1, 1)}  # after step 0
INVERSES = ("eigen", "cholesky")


class Preconditioner(Protocol):
    def step(self) -> object: ...


Method = Callable[[nn.Module, torch.optim.Optimizer], Preconditioner]


@dataclass(frozen=True)
class Workload:
    """A network with the size of its batch: `inputs` is the shape of one sample."""

    network: Callable[[], nn.Module]
    batch: int
    inputs: tuple[int, ...]
    classes: int = 10

    def __str__(self) -> str:
        return f"batch {self.batch} of {'x'.join(map(str, self.inputs))}"


WORKLOADS = {
    "mlp": Workload(networks.mlp, 128, (784,)),
    "resnet20": Workload(networks.resnet20, 128, (3, 32, 32)),
    "resnet32": Workload(networks.resnet32, 128, (3, 32, 32)),
    "resnet50": Workload(networks.resnet50, 8, (3, 224, 224), 1000),
    "encoder": Workload(networks.encoder, 16, (128, 256)),
}


def library(kind: str, inverse: str) -> Method:
    """natgrad with intervals that make every step after the first one of this kind."""
    update_every, refresh_every = INTERVALS[kind]

    def build(model: nn.Module, optimizer: torch.optim.Optimizer) -> Preconditioner:
        return natgrad.KFAC(
            model,
            optimizer,
            inverse=natgrad.Eigen() if inverse == "eigen" else natgrad.Cholesky(),
            update_every=update_every,
            refresh_every=refresh_every,
        )

    return build


def naive(kind: str, inverse: str) -> Method:
    """The textbook implementation with the same intervals."""
    update_every, refresh_every = INTERVALS[kind]

    def build(model: nn.Module, optimizer: torch.optim.Optimizer) -> Preconditioner:
        return NaiveKFAC(
            model,
            optimizer,
            inverse="eigen" if inverse == "eigen" else "cholesky",
            update_every=update_every,
            refresh_every=refresh_every,
        )

    return build


METHODS = {"natgrad": library, "naive": naive}


class Trainer:
    """Calling it is one training step: forward, backward, preconditioner, SGD with momentum.

    The learning rate is small: the weights move, but the loss neither vanishes nor explodes, so
    that the hundredth step costs what the first one does.
    """

    def __init__(self, workload: Workload, method: Method | None = None) -> None:
        torch.manual_seed(0)
        self.model = workload.network()
        self.inputs = torch.randn(workload.batch, *workload.inputs)
        self.targets = torch.randint(workload.classes, (workload.batch,))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.preconditioner = method(self.model, self.optimizer) if method else None

    def backward(self) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(self.inputs), self.targets).backward()

    def __call__(self) -> None:
        self.backward()
        if self.preconditioner is not None:
            self.preconditioner.step()
        self.optimizer.step()


class StageClock:
    """Seconds every single step of a preconditioner spent in each of its stages."""

    def __init__(self, preconditioner: Any) -> None:
        self.preconditioner = preconditioner
        self.total: dict[str, float] = {}
        self.stages: dict[str, Times] = {}

    def read(self) -> None:
        """Call after each step, the first included."""
        timings = getattr(self.preconditioner, "timings", None)
        source = timings() if timings else self.preconditioner
        total = dict(source.seconds)
        for stage, seconds in total.items():
            spent = seconds - self.total.get(stage, 0.0)
            self.stages.setdefault(stage, Times()).seconds.append(spent)
        self.total = total

    def best(self, *stages: str) -> float:
        """Least seconds of a step in these stages together, 0 where there is no such stage.

        The first step is left out: it allocates what the others use.
        """
        present = [self.stages[stage].seconds[1:] for stage in stages if stage in self.stages]
        return min(map(sum, zip(*present, strict=False)), default=0.0)
