"""Poisson's equation by a physics-informed network: K-FAC beside Adam and LBFGS.

python examples/pinn_poisson.py

``-Δu = 2 π² sin(πx) sin(πy)`` on the unit square, 0 on its border: ``u = sin(πx) sin(πy)``. The
residuals are plain PyTorch, and ``LeastSquares(model, weights=...)`` takes a function that returns
them: ``optimizer.step(lambda: residuals(model))``. The network needs no change.
"""

from collections.abc import Sequence
from functools import cache
from math import pi

import torch
from torch import Tensor, nn

from application import told
from pinn_race import Settings, Task, derivative, network, race

INSIDE, BORDER = 400, 100
# The best of those that `python -m benchmarks.pinns` tries.
BEST: Settings = {"K-FAC": (), "Adam": (3e-2, 0.99), "LBFGS": (1.0, 200)}


def exact(x: Tensor) -> Tensor:
    """``[n, 2] -> [n]``."""
    return (pi * x).sin().prod(1)


@cache
def inside() -> Tensor:
    """Points of a Sobol sequence, ``[n, 2]``."""
    return torch.quasirandom.SobolEngine(2, seed=0, scramble=True).draw(INSIDE).double()


@cache
def border() -> Tensor:
    """As many on each side of the square."""
    t = torch.linspace(0, 1, BORDER // 4).double()
    zero, one = torch.zeros_like(t), torch.ones_like(t)
    sides = [(t, zero), (t, one), (zero, t), (one, t)]
    return torch.cat([torch.stack(side, 1) for side in sides])


def residuals(model: nn.Module) -> list[Tensor]:
    x = inside().clone().requires_grad_()
    u = model(x)
    du = derivative(u, x)
    laplacian = sum(derivative(du[:, i], x)[:, i] for i in range(2))
    return [laplacian + 2 * pi**2 * exact(x), model(border())[:, 0]]


@torch.no_grad()
def error(model: nn.Module) -> float:
    """Of a grid, in L2, relative to the solution."""
    x = torch.cartesian_prod(*2 * [torch.linspace(0, 1, 50).double()])
    return float((model(x)[:, 0] - exact(x)).norm() / exact(x).norm())


TASK = Task(lambda: network(2), residuals, (1.0, 100.0), error)


def main(given: Sequence[str] | None = None) -> None:
    race(TASK, BEST, given, "-Δu = f on the unit square")


if __name__ == "__main__":
    told(main)
