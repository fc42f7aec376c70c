"""What the two PINN examples share: one network, trained by K-FAC, Adam or LBFGS for some seconds.

A task is a list of residuals with weights, ``L = sum_t w_t mean(r_t^2)``. All methods see the same
loss of the same network; only K-FAC is shown the residuals themselves.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter, process_time

import torch
from torch import Tensor, nn

import natgrad
from natgrad.curvature import GaussNewton

METHODS = ("K-FAC", "Adam", "LBFGS")


@dataclass(frozen=True)
class Task:
    """``residuals(model)``: one tensor a term; ``error(model)``: beside the analytic solution."""

    network: Callable[[], nn.Module]
    residuals: Callable[[nn.Module], list[Tensor]]
    weights: tuple[float, ...]
    error: Callable[[nn.Module], float]


@dataclass
class Run:
    """Seconds of CPU, steps (evaluations of the loss for LBFGS) and error, at a few moments."""

    seconds: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    loss: float = float("nan")


def network(inputs: int, width: int = 32) -> nn.Module:
    layers = [nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


def derivative(u: Tensor, x: Tensor) -> Tensor:
    """``du/dx [n, d]`` of each point, with its graph."""
    (found,) = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
    return found


def train(
    task: Task, method: str, seed: int, seconds: float, lr: float, setting: float, looks: int = 20
) -> Run:
    """``setting``: the damping of K-FAC, the second beta of Adam, the memory of LBFGS."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(seed)
    model, run = task.network(), Run()
    kfac, optimizer = None, _optimizer(method, model, lr, setting)
    if method == "K-FAC":
        kfac = natgrad.KFAC(
            model,
            optimizer,
            curvature=GaussNewton(),
            damping=setting,
            kl_clip=0.1,
            update_every=1,
            refresh_every=1,
        )
    spent, steps, said = 0.0, 0, perf_counter()

    def loss() -> Tensor:
        nonlocal steps
        steps += 1
        optimizer.zero_grad()
        terms = task.residuals(model)
        if kfac is not None:
            total = kfac.residuals(*terms, weights=task.weights)
        else:
            total = sum(w * r.square().mean() for w, r in zip(task.weights, terms, strict=True))
        total.backward()
        if kfac is not None:
            kfac.step()
        run.loss = float(total.detach())
        return total

    while spent < seconds:
        start = process_time()
        optimizer.step(loss)
        spent += process_time() - start
        if spent >= seconds * (len(run.errors) + 1) / looks:
            run.seconds.append(spent)
            run.steps.append(steps)
            run.errors.append(task.error(model))
        if perf_counter() - said > 10:
            said = perf_counter()
            print(f"  {method}: {spent:.0f} of {seconds:.0f} s, loss {run.loss:.3g}", flush=True)
    return run


def _optimizer(method: str, model: nn.Module, lr: float, setting: float) -> torch.optim.Optimizer:
    if method == "Adam":
        return torch.optim.Adam(model.parameters(), lr=lr, betas=(0.9, setting))
    if method == "LBFGS":
        own = {"history_size": int(setting), "line_search_fn": "strong_wolfe", "max_iter": 20}
        return torch.optim.LBFGS(model.parameters(), lr=lr, **own)
    return torch.optim.SGD(model.parameters(), lr=lr)


# Learning rate, and the damping of K-FAC, the second beta of Adam, the memory of LBFGS: the best
# of those that `python -m benchmarks.pinns` tries.
Settings = dict[str, tuple[float, float]]


def race(task: Task, best: Settings, given: Sequence[str] | None, what: str) -> None:
    """Train by each method, and print a table."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each method (default 15)")
    parser.add_argument("--seed", type=int, default=0, help="of the network (default 0)")
    args = parser.parse_args(given)
    print(f"{what}\n")
    runs = {}
    for method in METHODS:
        print(f"{method}, {args.seconds:g} seconds of CPU", flush=True)
        runs[method] = train(task, method, args.seed, args.seconds, *best[method])
    print(f"\n{'':8}{'steps':>8}{'loss':>12}{'L2 error':>12}   half way")
    for method, run in runs.items():
        half, last = run.errors[len(run.errors) // 2], run.errors[-1]
        print(f"{method:8}{run.steps[-1]:8,}{run.loss:12.2e}{last:12.2e}{half:11.2e}")
