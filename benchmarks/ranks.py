"""What one rank of `python -m benchmarks.distributed` does: a step of DDP, one of every placement,
and so on in turn, all ranks in step, with the bytes that each of them sends."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import nn

import natgrad
from benchmarks import networks
from benchmarks.workloads import NEVER, WORKLOADS, Trainer, Workload
from natgrad.lab import models
from natgrad.placement import Placement, Plan, Sent

KINDS = ("both", "stale", "update")  # of step 0, 1, 2, and so on
USUAL = {"update": 10, "refresh": 100}  # intervals that the plans are made for
DDP = "DDP alone"
KEPT = ("factors", "inverses")  # what a plan counts of the memory
PLACEMENTS: dict[str, Placement] = {
    "MemOpt()": natgrad.MemOpt(),
    "Hybrid(0.5)": natgrad.Hybrid(0.5),
    "CommOpt()": natgrad.CommOpt(),
    "ReduceScatter()": natgrad.ReduceScatter(),
    "Local()": natgrad.Local(),
    "Auto()": natgrad.Auto(),
}
NETWORKS = {name: WORKLOADS[name] for name in ("resnet20", "resnet32", "mlp")}
NETWORKS["small_cnn"] = Workload(networks.small_cnn, 32, (1, 8, 8))
NETWORKS["small-transformer"] = Workload(lambda: models.Transformer(4, 256, 4), 16, (64, 256))
STATISTICS = ("A", "G", "norm")  # stages of a backward pass that no placement changes
STEP = ("fold", "refresh", "apply")  # stages of kfac.step()


@dataclass(frozen=True)
class Turns:
    """An interval at which something happens on the steps of these kinds alone."""

    kinds: tuple[str, ...]
    usual: int  # what a planner is told

    def __call__(self, step: int) -> int:
        if step >= 10**6:
            return self.usual
        return 1 if KINDS[step % len(KINDS)] in self.kinds else NEVER


@dataclass(frozen=True)
class Setting:
    network: str
    batch: int  # of one rank
    repeats: int
    placements: tuple[str, ...]


@dataclass
class Measured:
    """Of one rank, by placement; what a step of one kind took and sent, by kind."""

    seconds: dict[str, dict[str, list[float]]]
    sent: dict[str, dict[str, dict[str, float]]]
    predicted: dict[str, Sent]
    memory: dict[str, int]
    planned: dict[str, int]
    plan: dict[str, Plan]
    parameters: int
    stages: dict[str, dict[str, list[dict[str, float]]]] = field(default_factory=dict)


def kfac(placement: Placement) -> Callable[[nn.Module, torch.optim.Optimizer], natgrad.KFAC]:
    def build(model: nn.Module, optimizer: torch.optim.Optimizer) -> natgrad.KFAC:
        return natgrad.KFAC(
            model,
            optimizer,
            distributed=natgrad.Distributed(placement),
            update_every=Turns(("update", "both"), USUAL["update"]),
            refresh_every=Turns(("both",), USUAL["refresh"]),
        )

    return build


def trainers(setting: Setting) -> dict[str, Trainer]:
    """One model each. ReduceScatter's is not under DDP: it adds the gradients up by itself."""
    plain = replace(NETWORKS[setting.network], batch=setting.batch)
    wrapped = replace(plain, network=lambda: nn.parallel.DistributedDataParallel(plain.network()))
    found = {DDP: Trainer(wrapped)}
    for name in setting.placements:
        workload = plain if name == "ReduceScatter()" else wrapped
        found[name] = Trainer(workload, kfac(PLACEMENTS[name]))
    return found


def measure(setting: Setting) -> Measured:
    """On one of the ranks of the default group."""
    every = trainers(setting)
    found = {name: trainer.preconditioner for name, trainer in every.items()}
    kfacs = {name: k for name, k in found.items() if isinstance(k, natgrad.KFAC)}
    seconds: dict[str, dict[str, list[float]]] = {n: {k: [] for k in KINDS} for n in every}
    sent: dict[str, dict[str, dict[str, float]]] = {name: {} for name in kfacs}
    stages: dict[str, dict[str, list[dict[str, float]]]] = {
        name: {kind: [] for kind in KINDS} for name in kfacs
    }
    for turn in range(1 + setting.repeats):  # the first one allocates what the others use
        for kind in KINDS:
            for name, train in every.items():
                before = kfacs[name].comm.traffic.snapshot() if name in kfacs else None
                spent = dict(kfacs[name].timings().seconds) if name in kfacs else {}
                dist.barrier()
                start = time.perf_counter()
                train()
                if turn:
                    seconds[name][kind].append(time.perf_counter() - start)
                if before is not None:
                    since = (kfacs[name].comm.traffic - before).sent
                    sent[name][kind] = {purpose: n for purpose, n in since.items() if n}
                    now = kfacs[name].timings().seconds
                    if turn:
                        stages[name][kind].append({s: now[s] - spent.get(s, 0.0) for s in now})
    return Measured(
        seconds,
        sent,
        {name: predicted(k) for name, k in kfacs.items()},
        {name: sum(k.memory().total.get(p, 0) for p in KEPT) for name, k in kfacs.items()},
        {name: kept(k.plan, k.comm.rank) for name, k in kfacs.items()},
        {name: k.plan for name, k in kfacs.items()},
        sum(p.numel() for p in every[DDP].model.parameters()),
        stages,
    )


def kept(plan: Plan, rank: int) -> int:
    """Bytes that the plan says a rank keeps of what is measured."""
    memory = plan.memory(rank)
    return sum(getattr(memory, kind) for kind in KEPT)


def predicted(k: natgrad.KFAC) -> Sent:
    """What the plan says that this rank sends."""
    others = sum(p.numel() for p in k.gradients.parameters) - sum(b.numel for b in k.plan.blocks)
    return k.plan.sent(k.comm.rank, others)


def by_kind(sent: Sent, kind: str) -> dict[str, float]:
    """What of it is sent in a step of this kind, by purpose."""
    clocks = {"stale": ("apply",), "update": ("apply", "update")}
    due = clocks.get(kind, ("apply", "update", "refresh"))
    purposes = {"apply": "gradients", "update": "factors", "refresh": "inverses"}
    found = {purposes[clock]: float(getattr(sent, purposes[clock])) for clock in due}
    found["agreement"] = sum(getattr(sent.agreement, clock) for clock in due)
    return {name: size for name, size in found.items() if size}
