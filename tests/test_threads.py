"""Trainings in threads of one process do not touch each other: bits are those of one alone."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import natgrad
from natgrad.linalg import workspace

PAIRS = 12
STEPS = 6


def network(seed: int) -> nn.Module:
    """Convolutions of both ways to their correlations, norms, and linear layers of other sizes."""
    torch.manual_seed(seed)
    width = 8 + 4 * (seed % 3)
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(width * 16, 12),
        nn.Tanh(),
        nn.Linear(12, 5),
    ).double()


def settings(seed: int) -> dict:
    choices = [
        {"inverse": natgrad.Eigen()},
        {"inverse": natgrad.Cholesky()},
        {"structure": natgrad.EKFAC()},
        {"structure": natgrad.Kronecker("reduce")},
    ]
    return {"update_every": 1, "refresh_every": 2, **choices[seed % len(choices)]}


def trained(seed: int, model: nn.Module, start: Barrier | None = None) -> list[torch.Tensor]:
    """The weights after some steps; random numbers are of a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    kfac = natgrad.KFAC(model, optimizer, **settings(seed))
    if start is not None:
        start.wait(60)
    for _ in range(STEPS):
        x = torch.randn(16, 3, 8, 8, generator=generator, dtype=torch.float64)
        y = torch.randint(5, (16,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        kfac.step()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("pair", range(PAIRS))
def test_two_trainings_at_once_are_those_of_two_in_turn(pair):
    seeds = (2 * pair, 2 * pair + 1)
    expected = [trained(seed, network(seed)) for seed in seeds]
    models = [network(seed) for seed in seeds]  # torch's own random numbers are of the process
    start = Barrier(2)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(trained, seeds, models, [start, start]))
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_thread_has_buffers_of_its_own():
    workspace.release()
    like = torch.zeros(())
    mine = workspace.workspace("key", (8,), like)
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(workspace.workspace, "key", (8,), like).result()
    assert theirs.data_ptr() != mine.data_ptr()
    assert workspace.workspace("key", (8,), like) is mine
    assert workspace.held() == 32
