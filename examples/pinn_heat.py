"""The heat equation by a physics-informed network: K-FAC beside Adam and LBFGS.

python examples/pinn_heat.py

``u_t = u_xx / 4`` for ``0 < x < 1``, ``0 < t < 1``, 0 at both ends, and ``sin(πx) + sin(2πx) / 2``
in the beginning. Three terms, each a mean over points of its own: the equation, the ends, and the
start. K-FAC has the Gauss-Newton matrix of each with the weight that the loss gives it.
"""

from collections.abc import Sequence
from functools import cache
from math import pi

import torch
from torch import Tensor, nn

from application import told
from pinn_race import Settings, Task, derivative, network, race

# The best of those that `python -m benchmarks.pinns` tries.
BEST: Settings = {"K-FAC": (), "Adam": (3e-2, 0.99), "LBFGS": (1.0, 200)}


def exact(p: Tensor) -> Tensor:
    """``[n, (x, t)] -> [n]``."""
    x, t = p.unbind(1)
    slow, fast = (-(pi**2) * t / 4).exp(), (-(pi**2) * t).exp()
    return slow * (pi * x).sin() + fast * (2 * pi * x).sin() / 2


@cache
def points(n: int, seed: int) -> Tensor:
    return torch.quasirandom.SobolEngine(2, seed=seed, scramble=True).draw(n).double()


def residuals(model: nn.Module) -> list[Tensor]:
    p = points(400, 0).clone().requires_grad_()
    du = derivative(model(p), p)
    second = derivative(du[:, 0], p)[:, 0]
    ends, start = points(50, 1).clone(), points(50, 2).clone()
    ends[:, 0], start[:, 1] = ends[:, 0].round(), 0.0
    return [du[:, 1] - second / 4, model(ends)[:, 0], model(start)[:, 0] - exact(start)]


@torch.no_grad()
def error(model: nn.Module) -> float:
    """Of a grid, in L2, relative to the solution."""
    p = torch.cartesian_prod(*2 * [torch.linspace(0, 1, 50).double()])
    return float((model(p)[:, 0] - exact(p)).norm() / exact(p).norm())


TASK = Task(lambda: network(2), residuals, (1.0, 10.0, 10.0), error)


def main(given: Sequence[str] | None = None) -> None:
    race(TASK, BEST, given, "u_t = u_xx / 4 on the unit square of x and t")


if __name__ == "__main__":
    told(main)
