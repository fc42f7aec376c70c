"""Training of a network in any layout, and what it looks like from inside."""

from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import natgrad
from distributed import training
from distributed.parallel import EACH, TOKENS, batch, network, quiet, spread
from distributed.training import weights
from kfac_keywords import grouped
from natgrad import KFAC

STEPS = 3  # of which the first and the last update
PLACEMENTS = {
    "mem": natgrad.MemOpt(),
    "half": natgrad.Hybrid(0.5),
    "comm": natgrad.CommOpt(),
    "scatter": natgrad.ReduceScatter(),
}
METHODS = {
    **training.METHODS,
    "exact": {"curvature": natgrad.ExactFisher()},
    "drawn": {"curvature": natgrad.MonteCarloFisher(samples=2, seed=3)},
}


@dataclass(frozen=True)
class Case:
    """What is trained, and how it is spread; ``options`` are those of DDP or ``fully_shard``."""

    network: str = "tower"
    layout: str = "tp"
    method: str = "eigen"
    placement: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    micro: int = 1  # backward passes of a step
    reduction: str = "mean"
    # Momentum counts: 1e-2 for a step alone. It hides how long gradients are.
    clip: float | None = 1.0 / TOKENS
    users: tuple[int, ...] = ()  # samples of each step that use every layer of "branches"
    dtype: torch.dtype = torch.float64
    length: int = STEPS

    @property
    def steps(self) -> int:
        return len(self.users) or self.length

    def spread(self) -> tuple[nn.Module, int, int]:
        model = network(self.network, self.dtype)
        return spread(model, self.network, self.layout, self.options)

    def make(self, model: nn.Module, **more: Any) -> tuple[KFAC, torch.optim.Optimizer]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        settings = {"update_every": 2, "refresh_every": 2, **METHODS[self.method]}
        # Without a clip, small dampings make steps long, and differences in rounding large.
        settings |= {"kl_clip": self.clip, "damping": (3e-3 if self.clip else 0.1) / TOKENS}
        settings |= {"placement": self.placement, **more}
        # More than one bucket, so that some leave early.
        settings["bucket_bytes"] = 600
        settings = grouped(self.reduction, terms_per_sample=TOKENS, **settings)
        kfac = KFAC(model, optimizer, **settings)
        return kfac, optimizer


def alone(case: Case, replicas: int) -> dict[str, Tensor]:
    """One process with the batches of all replicas as one."""
    model = network(case.network, case.dtype)
    kfac, optimizer = case.make(model)
    for step in range(case.steps):
        optimizer.zero_grad()
        x, y = batch(case.network, step, EACH * replicas)
        if case.users:
            model.users = slice(case.users[step])
        loss(case, model, kfac, x, y).backward()
        kfac.step()
        optimizer.step()
    return weights(model)


def loss(case: Case, model: nn.Module, kfac: KFAC, x: Tensor, y: Tensor) -> Tensor:
    out = model(x.to(case.dtype) if x.is_floating_point() else x)
    kfac.observe(out)
    return F.cross_entropy(out, y, reduction=case.reduction)


def train_all(cases: dict[Any, Case]) -> dict[Any, dict[str, Any]]:
    """Each once, by its name."""
    return {name: train(case) for name, case in cases.items()}


def train(case: Case) -> dict[str, Any]:
    """On the ranks of the default group."""
    quiet()
    model, part, parts = case.spread()
    kfac, optimizer = case.make(model)
    sent = []
    for step in range(case.steps):
        optimizer.zero_grad()
        backward(case, model, kfac, step, part, parts)
        before = kfac.comm.traffic.snapshot()
        kfac.step()
        sent.append((kfac.comm.traffic - before).sent)
        optimizer.step()
    return {
        "weights": weights(model),
        "sent": sent,
        "planned": kfac.plan.sent(kfac.comm.rank),
        "kept": kept(kfac),
        "memory": kfac.plan.memory(kfac.comm.rank),
    }


def backward(case: Case, model: nn.Module, kfac: KFAC, step: int, part: int, parts: int) -> None:
    """This part of a step's batch, in passes of which only the last one adds up gradients."""
    x, y = batch(case.network, step, EACH * parts)
    x, y = x[EACH * part : EACH * (part + 1)], y[EACH * part : EACH * (part + 1)]
    if case.layout == "one batch":
        mesh = next(model.parameters()).device_mesh
        x, y = (distribute_tensor(t, mesh, [Shard(0)]) for t in (x, y))
    if case.users:
        users = min(max(case.users[step] - EACH * part, 0), EACH)
        getattr(model, "module", model).users = slice(users)
    pieces = list(zip(x.chunk(case.micro), y.chunk(case.micro), strict=True))
    for index, (one, target) in enumerate(pieces):
        last = index == len(pieces) - 1
        if hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(last)
        with ExitStack() as contexts:
            if hasattr(model, "no_sync") and not last:
                contexts.enter_context(model.no_sync())
            if case.layout == "tp with its loss":
                contexts.enter_context(loss_parallel())
            value = loss(case, model, kfac, one, target)
            (value / len(pieces) if case.reduction == "mean" else value).backward()


def kept(kfac: KFAC) -> tuple[int, int]:
    """Bytes of running averages and of their decompositions on this rank."""
    factors = sum(r.mean.nbytes for block in kfac.blocks for r in block.running.values())
    parts = (p for block in kfac.blocks for one in block.parts.values() for p in one)
    return factors, sum(part.nbytes for part in parts)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], where: str = "") -> None:
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        error = (found[name] - weight).abs().max() / weight.abs().max()
        assert error <= 1e-10, f"{where} {name}: {error:.1e}"


# What is seen from inside.


class Shapes(TorchDispatchMode):
    """The last two dimensions of all tensors that operations return."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        out = function(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, Tensor):
                self.seen.add(tuple(getattr(value, "_local_tensor", value).shape[-2:]))
        return out


def inside(case: Case) -> dict[str, Any]:
    """Two steps; what the last one, which updates nothing, puts together on this rank, what is
    kept, and what an update counts."""
    quiet()
    model, part, parts = case.spread()
    kfac, optimizer = case.make(model)
    assembled, totals, shapes = [], [], Shapes()
    finish, collect = kfac.reducer.finish, kfac.gradients.collect

    def finished(*args: Any) -> Any:
        found = finish(*args)
        totals.append((found[0].samples, found[0].even, found[0].counts))
        return found

    def collected(*args: Any) -> None:
        collect(*args)
        full = kfac.gradients._full
        assembled.append({b.name for b in kfac.blocks for p in b.parameters if id(p) in full})

    kfac.reducer.finish, kfac.gradients.collect = finished, collected
    for step in range(2):
        optimizer.zero_grad()
        backward(case, model, kfac, step, part, parts)
        with shapes if step else nullcontext():
            kfac.step()
        optimizer.step()
    plan, rank = kfac.plan, kfac.comm.rank
    return {
        "mine": {name for name, ranks in plan.workers.items() if rank in ranks},
        "assembled": assembled,
        "shapes": shapes.seen,
        "totals": totals,
        "factors": {(b.name, n) for b in kfac.blocks for n in b.running},
        "planned factors": {f for f, ranks in plan.keepers.items() if rank in ranks},
        "parts": {(b.name, n) for b in kfac.blocks for n in b.parts},
        "planned parts": {f for f, ranks in plan.holders.items() if rank in ranks},
        "blocks": {b.name: {b.shape[1:], tuple(b.parameters[0].shape)} for b in kfac.blocks},
        "draws as": kfac.observation.rank,
    }
