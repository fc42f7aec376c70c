"""Small models with every kind of loss, beside their dense matrices."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dense_matrices import Dense, mlp, ready, rows, uneven
from natgrad.curvature.losses import CrossEntropy, OwnLoss
from natgrad.operators import Problem

N = 6
CLASS_WEIGHTS = torch.tensor([0.5, 2.0, 1.2], dtype=torch.float64)
IGNORED = -100


def says(error: type[Exception], message: str, make: Callable[..., Any], *args: Any) -> None:
    """The whole message, word by word."""
    with pytest.raises(error) as caught:
        make(*args)
    assert str(caught.value) == message


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def classes(*shape: int, ignored: bool = False) -> Tensor:
    """Of three; some do not count, and all of the first sample's but one."""
    y = torch.randint(3, shape)
    if ignored:
        y[torch.rand(shape) < 0.3] = IGNORED
        y[0] = IGNORED
        y.view(shape[0], -1)[1, 0] = 2
    return y


@dataclass(frozen=True)
class Case:
    """A model and data with a loss as natgrad is given it and as torch computes it."""

    model: nn.Module
    x: Tensor
    y: Tensor
    loss: Any
    mean: Callable[[Tensor, Tensor], Tensor]

    @cached_property
    def dense(self) -> Dense:
        return Dense(self.model, self.mean, (self.x,), self.y)

    @property
    def cut(self) -> list[tuple[Tensor, Tensor]]:
        return uneven(self.x, self.y)

    def problem(self, **options: Any) -> Problem:
        return Problem(self.model, self.loss, self.cut, **options)


def flat_mean(mean: Callable[..., Tensor], **options: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda f, y: mean(f.flatten(0, -2), y.flatten(), **options)


def log_cosh(f: Tensor, y: Tensor) -> Tensor:
    """A loss of one's own, with a coupling of the outputs."""
    e = f - y
    return (e.cosh().log().sum(1) + e.sum(1).square()).mean()


def log_cosh_hessian(f: Tensor, y: Tensor) -> Tensor:
    return torch.diag_embed((f - y).cosh().pow(-2)) + 2


def tokens() -> nn.Module:
    return ready(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)))


def pixels() -> nn.Module:
    return ready(nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Conv2d(3, 3, 1)))


@cache
def known(name: str) -> Case:
    """Made once, for tests that leave it as it is."""
    return case(name)


def case(name: str) -> Case:
    """Made anew, for tests that change it."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return CASES[name]()


def _classes(loss: Any, mean: Any, ignored: bool = False) -> Case:
    return Case(ready(mlp()), rows(N)[0], classes(N, ignored=ignored), loss, mean)


def _weighted() -> Case:
    loss = nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.1)
    return _classes(loss, loss, ignored=True)


def _smooth() -> Case:
    loss = nn.CrossEntropyLoss(label_smoothing=0.2)
    return _classes(loss, loss)


def _probabilities() -> Case:
    y = torch.rand(N, 3, dtype=torch.float64)
    return Case(ready(mlp()), rows(N)[0], y, F.cross_entropy, F.cross_entropy)


def _sequence() -> Case:
    y = classes(N, 2, ignored=True)
    return Case(
        tokens(), randn(N, 2, 4), y, CrossEntropy(class_axis=-1), flat_mean(F.cross_entropy)
    )


def _weighted_sequence() -> Case:
    loss = CrossEntropy(class_axis=-1, class_weights=CLASS_WEIGHTS)
    mean = flat_mean(F.cross_entropy, weight=CLASS_WEIGHTS)
    return Case(tokens(), randn(N, 2, 4), classes(N, 2, ignored=True), loss, mean)


def _ahead() -> Case:
    loss = CrossEntropy(class_axis=-1, ahead=1)

    def mean(f: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(f[:, :-1].flatten(0, 1), y[:, 1:].flatten())

    return Case(tokens(), randn(N, 3, 4), classes(N, 3), loss, mean)


def _pixels() -> Case:
    loss = nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)
    return Case(pixels(), randn(N, 2, 3, 3), classes(N, 2, 2, ignored=True), loss, loss)


def _square() -> Case:
    return Case(ready(mlp()), rows(N)[0], randn(N, 3), F.mse_loss, F.mse_loss)


def _binary() -> Case:
    loss = nn.BCEWithLogitsLoss(pos_weight=CLASS_WEIGHTS)
    return Case(ready(mlp()), rows(N)[0], torch.randint(2, (N, 3)).double(), loss, loss)


def _own() -> Case:
    loss = OwnLoss(log_cosh, log_cosh_hessian)
    return Case(ready(mlp()), rows(N)[0], randn(N, 3), loss, log_cosh)


CASES: dict[str, Callable[[], Case]] = {
    "classes": lambda: _classes(F.cross_entropy, F.cross_entropy),
    "ignored": lambda: _classes(F.cross_entropy, F.cross_entropy, ignored=True),
    "weighted": _weighted,
    "smooth": _smooth,
    "probabilities": _probabilities,
    "sequence": _sequence,
    "weighted sequence": _weighted_sequence,
    "ahead": _ahead,
    "pixels": _pixels,
    "square": _square,
    "binary": _binary,
    "own": _own,
}
