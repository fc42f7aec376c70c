"""What the two PINN examples share: one network, trained by K-FAC, Adam or LBFGS for some seconds.

A task is a list of residuals with weights, ``L = sum_t w_t mean(r_t^2)``. All methods see the same
loss of the same network; only K-FAC is shown the residuals themselves. It has no settings here: it
is `natgrad.least_squares.LeastSquares` as it comes.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import cos, pi
from time import perf_counter, process_time

import torch
from torch import Tensor, nn

from natgrad.least_squares import LeastSquares

METHODS = ("K-FAC", "Adam", "LBFGS")
# Learning rate and second beta of Adam, learning rate and memory of LBFGS; nothing for K-FAC.
Settings = dict[str, tuple[float, ...]]


@dataclass(frozen=True)
class Task:
    """``residuals(model)``: one tensor a term; ``error(model)``: beside the analytic solution."""

    network: Callable[[], nn.Module]
    residuals: Callable[[nn.Module], list[Tensor]]
    weights: tuple[float, ...]
    error: Callable[[nn.Module], float]


@dataclass
class Run:
    """Seconds of CPU, steps (evaluations of the loss for LBFGS), loss and error, at a few moments.
    The loss is that of the weights the error is of."""

    seconds: list[float] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


def network(inputs: int, width: int = 32) -> nn.Module:
    layers = [nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


def derivative(u: Tensor, x: Tensor) -> Tensor:
    """``du/dx [n, d]`` of each point, with its graph."""
    (found,) = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
    return found


def total(task: Task, model: nn.Module) -> Tensor:
    terms = task.residuals(model)
    return sum(w * r.square().mean() for w, r in zip(task.weights, terms, strict=True))


def train(
    task: Task, method: str, seed: int, seconds: float, *settings: float, looks: int = 20
) -> Run:
    """Looks at the errors are not counted."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(seed)
    model, run = task.network(), Run()
    optimizer, closure = prepared(task, method, model, *settings)
    spent, steps, said = 0.0, 0, perf_counter()

    def evaluated() -> object:
        nonlocal steps
        steps += 1
        return closure()

    rate = optimizer.param_groups[0].get("lr", 1.0)
    while spent < seconds:
        if method == "Adam":  # half a cosine over the seconds that it has
            optimizer.param_groups[0]["lr"] = rate * (1 + cos(pi * spent / seconds)) / 2
        start = process_time()
        if method == "LBFGS":
            optimizer.step(evaluated)
        else:
            optimizer.step(closure)
            steps += 1
        spent += process_time() - start
        if spent >= seconds * (len(run.errors) + 1) / looks:
            run.seconds.append(spent)
            run.steps.append(steps)
            run.errors.append(task.error(model))
            run.losses.append(float(total(task, model).detach()))
        if perf_counter() - said > 10:
            said, last = perf_counter(), run.losses[-1] if run.losses else float("nan")
            print(f"  {method}: {spent:.0f} of {seconds:.0f} s, loss {last:.3g}", flush=True)
    return run


def prepared(
    task: Task, method: str, model: nn.Module, *settings: float
) -> tuple[torch.optim.Optimizer, Callable[[], object]]:
    """The optimizer, and the closure that its steps take."""
    if method == "K-FAC":
        return LeastSquares(model, weights=task.weights), lambda: task.residuals(model)
    lr, own = settings
    if method == "Adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.9, own))
    else:
        more = {"history_size": int(own), "line_search_fn": "strong_wolfe", "max_iter": 20}
        optimizer = torch.optim.LBFGS(model.parameters(), lr=lr, **more)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = total(task, model)
        loss.backward()
        return loss

    return optimizer, closure


def race(task: Task, best: Settings, given: Sequence[str] | None, what: str) -> None:
    """Train by each method, and print a table."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each method (default 10)")
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
        print(f"{method:8}{run.steps[-1]:8,}{run.losses[-1]:12.2e}{last:12.2e}{half:11.2e}")
