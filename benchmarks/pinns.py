"""Physics-informed networks: `python -m benchmarks.pinns` (four minutes on one core).

The two tasks of `examples/pinn_poisson.py` and `pinn_heat.py`, in float64. Adam and LBFGS have as
many trials of their settings, on one seed and on each task; that with the smallest loss at the end
then trains on further seeds. K-FAC has none: it is `LeastSquares` with its defaults. All have the
same seconds of CPU, so that it may run beside other work. Printed are the median L2 errors beside
the analytic solution: at the end, after a third of the seconds, and after as many steps as the
slowest method makes. An evaluation of the loss is a step of LBFGS.

`--blocks` compares Kronecker products with the dense Gauss-Newton blocks of the Poisson task.
"""

import argparse
import importlib
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import natgrad
from benchmarks.timing import machine
from natgrad.curvature import GaussNewton
from natgrad.structures import EKFAC, Full, Kronecker, Structure

TASKS = ("poisson", "heat")
TRIALS: dict[str, list[tuple[float, ...]]] = {
    "K-FAC": [()],
    "Adam": [(3e-3, 0.99), (1e-2, 0.99), (3e-2, 0.99), (0.1, 0.99), (1e-2, 0.999), (3e-2, 0.999)],
    "LBFGS": [(lr, memory) for lr in (0.5, 1.0) for memory in (10, 50, 200)],
}


def example(name: str) -> Any:
    folder = str(Path(__file__).parents[1] / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


def measure(task: str, methods: Sequence[str], seconds: float, seeds: int) -> dict[str, Any]:
    """All runs of one task: what was tried, and the best on all seeds."""
    race, found = example("pinn_race"), {}
    this = example(f"pinn_{task}").TASK
    for method in methods:
        tried = []
        for setting in TRIALS[method] if len(TRIALS[method]) > 1 else []:
            run = race.train(this, method, 0, seconds, *setting)
            loss, error = run.losses[-1], run.errors[-1]
            tried.append((loss if loss == loss else float("inf"), setting))
            print(f"{task}, {method} {setting}: loss {loss:.2e}, error {error:.2e}", flush=True)
        best = min(tried)[1] if tried else TRIALS[method][0]
        runs = [race.train(this, method, 1 + s, seconds, *best) for s in range(seeds)]
        found[method] = {"tried": tried, "best": best, "runs": [asdict(run) for run in runs]}
    return found


def at(run: dict[str, Any], key: str, value: float) -> float:
    """The error at the last look that is not later than some seconds or steps."""
    looks = [e for e, x in zip(run["errors"], run[key], strict=True) if x <= value * 1.02]
    return looks[-1] if looks else float("nan")


def table(found: dict[str, dict[str, Any]], seconds: float) -> str:
    """Markdown."""
    lines = [
        f"| task | method | settings | steps | error at {seconds / 3:.2g} s | at {seconds:g} s "
        "(worst seed) | steps of K-FAC | error at them |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for task, methods in found.items():
        slowest = min(r["steps"][-1] for r in methods["K-FAC"]["runs"])
        for method, one in methods.items():
            runs = one["runs"]
            early = statistics.median(at(r, "seconds", seconds / 3) for r in runs)
            last = [r["errors"][-1] for r in runs]
            steps = statistics.median(r["steps"][-1] for r in runs)
            same = statistics.median(at(r, "steps", slowest) for r in runs)
            settings = "defaults"
            if one["best"]:
                rate, own = one["best"]
                settings = f"lr {rate:g}, {'beta2' if method == 'Adam' else 'memory'} {own:g}"
            lines.append(
                f"| {task} | {method} | {settings} | {steps:,.0f} | {early:.1e} | "
                f"{statistics.median(last):.1e} ({max(last):.1e}) | {slowest:,} | {same:.1e} |"
            )
    return "\n".join(lines)


def blocks(steps: Sequence[int] = (0, 200)) -> str:
    """Kronecker products beside the dense Gauss-Newton blocks of the interior term: relative errors
    in Frobenius norm, traces, and the cosine between the two preconditioned gradients in the metric
    of the block. After some steps of Adam."""
    race, this = example("pinn_race"), example("pinn_poisson").TASK
    lines = [
        "| steps | layer | product | error | trace | cosine |",
        "|---:|---|---|---:|---:|---:|",
    ]
    torch.set_default_dtype(torch.float64)
    for count in steps:
        torch.manual_seed(0)
        model = race.network(2, 16)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(count):
            terms = this.residuals(model)
            optimizer.zero_grad()
            sum(w * r.square().mean() for w, r in zip(this.weights, terms, strict=True)).backward()
            optimizer.step()
        truth = _dense(model, this, Full())
        traces = _dense(model, this, Kronecker(sharing="traces"))
        ekfac = _dense(model, this, EKFAC(sharing="traces"))
        taylor = forward_laplacian(model, example("pinn_poisson").inside())
        for layer, (right, gradient, shape) in truth.items():
            products = {
                "traces": traces[layer][0],
                "forward Laplacian, expand": taylor[layer],
                "nearest of all": nearest(right, *shape),
                "EKFAC, traces": ekfac[layer][0],
            }
            for name, block in products.items():
                error = float((block - right).norm() / right.norm())
                share, cosine = (
                    float(block.trace() / right.trace()),
                    _cosine(block, right, gradient),
                )
                lines.append(
                    f"| {count} | {layer} | {name} | {error:.2f} | {share:.2f} | {cosine:.2f} |"
                )
    return "\n".join(lines)


def nearest(block: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """The Kronecker product with the smallest error: the first singular triple of the block with
    its axes in another order (Van Loan 2000)."""
    turned = block.view(rows, cols, rows, cols).transpose(1, 2).reshape(rows**2, cols**2)
    u, s, v = torch.linalg.svd(turned, full_matrices=False)
    return torch.kron(s[0] * u[:, 0].view(rows, rows), v[0].view(cols, cols))


def forward_laplacian(model: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """K-FAC of the Laplacian after Dangel et al. 2024, for layers of tanh: value, first derivatives
    and Laplacian go forward together, as shared positions of each linear layer."""
    n, d = x.shape
    parts = [x, *torch.eye(d).unsqueeze(1).expand(d, n, d), torch.zeros(n, d)]
    uses: dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for name, module in model.named_children():
        if isinstance(module, torch.nn.Linear):
            matrix = torch.cat([module.weight, module.bias.unsqueeze(1)], 1)
            ones = [torch.full((n, 1), float(i == 0)) for i in range(len(parts))]
            inputs = [torch.cat(pair, 1) for pair in zip(parts, ones, strict=True)]
            parts = [one @ matrix.mT for one in inputs]
            uses[name] = inputs, parts
        else:
            value, *first, last = parts
            t = value.tanh()
            slope, bend = 1 - t**2, -2 * t * (1 - t**2)
            squares = torch.stack(first).square().sum(0)
            parts = [t, *(slope * one for one in first), slope * last + bend * squares]
    outputs = [z for _, zs in uses.values() for z in zs]
    ones = torch.full_like(parts[-1], (2 / n) ** 0.5)
    found = iter(torch.autograd.grad(parts[-1], outputs, ones, allow_unused=True))
    blocks = {}
    for name, (inputs, zs) in uses.items():
        gs = [torch.zeros_like(z) if g is None else g for z, g in zip(zs, found, strict=False)]
        a = sum(one.mT @ one for one in inputs) / (n * len(inputs))
        blocks[name] = torch.kron(sum(g.mT @ g for g in gs), a).detach()
    return blocks


def _dense(model: torch.nn.Module, task: Any, structure: Structure) -> dict[str, Any]:
    kfac = natgrad.KFAC(
        model,
        curvature=GaussNewton(),
        structure=structure,
        kl_clip=None,
        update_every=1,
        refresh_every=1,
        factor_decay=0.0,
    )
    found = {}
    for _ in range(2):  # EKFAC measures along the basis of the last refresh
        model.zero_grad()
        kfac.residuals(task.residuals(model)[0]).backward()
        raw = {}
        for block in kfac.blocks:
            out = torch.zeros(block.shape)
            block.layers[0].load(out, lambda p: torch.zeros_like(p) if p.grad is None else p.grad)
            raw[block.name] = out.flatten()
        kfac.step()
    for block in kfac.blocks:
        kept = block.kept()
        matrix = block.structure.matrix(kept, block.forms, block.shape, block.decomposed_factors())
        found[block.name] = matrix.dense(), raw[block.name], block.shape[1:]
    kfac.detach()
    return found


def _cosine(block: torch.Tensor, right: torch.Tensor, gradient: torch.Tensor) -> float:
    damped = 1e-3 * right.trace() / len(right) * torch.eye(len(right))
    metric = right + damped
    one, two = (torch.linalg.solve(m + damped, gradient) for m in (block, right))
    length = ((one @ metric @ one) * (two @ metric @ two)).sqrt()
    return float(one @ metric @ two / length)


def picture(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Error against seconds and against steps, a line a seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3 * len(found)), layout="constrained")
    axes = figure.subplots(len(found), 2, squeeze=False, sharey="row")
    colours = {"K-FAC": "#c03d3e", "Adam": "#3274a1", "LBFGS": "#3a923a"}
    for row, (task, methods) in zip(axes, found.items(), strict=True):
        for column, key in zip(row, ("seconds", "steps"), strict=True):
            for method, one in methods.items():
                for number, run in enumerate(one["runs"]):
                    label = method if number == 0 else None
                    column.plot(run[key], run["errors"], color=colours[method], label=label)
            column.set(xlabel="seconds of CPU" if key == "seconds" else "steps", yscale="log")
            if key == "steps":
                column.set(xscale="log")
        row[0].set(ylabel="relative L2 error", title=task)
        row[0].legend()
    figure.savefig(path, metadata={"Date": None})


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of a run (default 5)")
    parser.add_argument("--seeds", type=int, default=3, help="of the best settings (default 3)")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, help="default both")
    parser.add_argument("--blocks", action="store_true", help="compare blocks, and do not train")
    parser.add_argument("--json", type=Path, help="write all runs to this file")
    parser.add_argument("--read", nargs="+", type=Path, help="files of --json, instead of runs")
    parser.add_argument("--picture", type=Path, help="draw all runs")
    args = parser.parse_args(given)
    if args.blocks:
        print(blocks())
        return
    methods = example("pinn_race").METHODS
    if args.read:
        read = [json.loads(path.read_text(encoding="utf-8"))["runs"] for path in args.read]
        found = {task: runs for one in read for task, runs in one.items()}
    else:
        found = {task: measure(task, methods, args.seconds, args.seeds) for task in args.tasks}
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "runs": found}), encoding="utf-8")
    if args.picture:
        picture(found, args.picture)
    print(table(found, args.seconds))


if __name__ == "__main__":
    main()
