"""A few steps of training on several processes of this machine, of which bytes, memory and CPU
seconds are noted, each beside what the plan says.

Seconds are those of the processor, of the thread that trains: on a machine that does other things
as well they are what a stage costs, while those of a clock are not. Waiting is not in them, so how
long messages take is not either; their bytes are exact.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from natgrad import KFAC, Distributed
from natgrad.capture.stopwatch import Stopwatch
from natgrad.comm import launch
from natgrad.kfac.reports import Memory
from natgrad.lab.models import convnet, small_resnet
from natgrad.placement import Placement, Sent

NEVER = 10**9
KINDS = ("refresh", "stale", "update")  # of step 0, 1, 2, and so on
KEPT = ("factors", "inverses")  # what a plan says of the memory that is always taken


@dataclass(frozen=True)
class Turns:
    """An interval at which something happens on the steps of these kinds alone.

    Arguments:
        kinds: of those in `KINDS`.
        usual: what a planner is told.
    """

    kinds: tuple[str, ...]
    usual: int

    def __call__(self, step: int) -> int:
        if step >= 10**6:  # what a planner asks for
            return self.usual
        return 1 if KINDS[step % len(KINDS)] in self.kinds else NEVER


@dataclass(frozen=True)
class RankJob:
    """What all ranks are told to do.

    Arguments:
        placements: by name; each trains a copy of the network.
        rounds: of steps of all kinds, after one that is not counted.
        batch: samples of a rank.
        depth: of a ResNet for images of 32 x 32; 0 is a network of two convolutions for 8 x 8.
        seed: of weights and samples.
    """

    placements: tuple[tuple[str, Placement], ...]
    rounds: int
    batch: int
    depth: int
    seed: int

    def network(self) -> nn.Module:
        return small_resnet(self.depth) if self.depth else convnet((3, 8, 8), batch_norm=True)

    def inputs(self) -> Tensor:
        side = 32 if self.depth else 8
        return torch.randn(self.batch, 3, side, side)


class CpuStopwatch(Stopwatch):
    """Seconds of the processor, of the thread that calls it."""

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.thread_time()
        try:
            yield
        finally:
            self.seconds[stage] += time.thread_time() - start
            self.calls[stage] += 1


def measured(job: RankJob, ranks: int) -> list[dict[str, dict[str, Any]]]:
    """For each rank, by placement: what `on_a_rank` notes.

    Arguments:
        job: what is trained.
        ranks: how many processes.
    """
    found: list[dict[str, dict[str, Any]]] = launch.run(on_a_rank, job, ranks=ranks)
    return found


def on_a_rank(job: RankJob) -> dict[str, dict[str, Any]]:
    """By placement: bytes ``sent`` and those ``planned``, by kind of step and purpose; CPU
    ``seconds`` by kind and stage, the least of all rounds; bytes ``kept`` and those planned;
    ``work``, the operations of preconditioning by the plan; and the ``weights`` in the end.

    Arguments:
        job: what is trained.
    """
    return {name: _trained(job, one) for name, one in job.placements}


def _trained(job: RankJob, placement: Placement) -> dict[str, Any]:
    torch.manual_seed(job.seed)
    network = job.network()
    model = nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kfac = KFAC(
        model,
        optimizer,
        distributed=Distributed(placement),
        update_every=Turns(("update", "refresh"), 10),
        refresh_every=Turns(("refresh",), 100),
    )
    rank = kfac.comm.rank
    watch = CpuStopwatch()
    kfac.time_with(watch)
    torch.manual_seed(1000 * job.seed + rank)
    sent: dict[str, dict[str, float]] = {}
    seconds: dict[str, dict[str, float]] = {}
    for step in range(len(KINDS) * (1 + job.rounds)):
        inputs = job.inputs()
        labels = torch.randint(10, (job.batch,))
        before, spent = kfac.comm.traffic.snapshot(), dict(watch.seconds)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        kfac.step()
        optimizer.step()
        kind = KINDS[step % len(KINDS)]
        sent[kind] = {name: n for name, n in (kfac.comm.traffic - before).sent.items() if n}
        if step >= len(KINDS):  # the first round allocates what the others use
            now = {stage: watch.seconds[stage] - spent.get(stage, 0.0) for stage in watch.seconds}
            least = seconds.get(kind, now)
            seconds[kind] = {stage: min(least.get(stage, s), s) for stage, s in now.items()}
    memory, plan = kfac.memory(), kfac.plan
    assert isinstance(memory, Memory)
    others = sum(p.numel() for p in kfac.gradients.parameters) - sum(b.numel for b in plan.blocks)
    planned = plan.memory(rank)
    return {
        "sent": sent,
        "planned": {kind: _planned(plan.sent(rank, others), kind) for kind in KINDS},
        "seconds": seconds,
        "kept": sum(memory.total.get(kind, 0) for kind in KEPT),
        "planned_kept": sum(getattr(planned, kind) for kind in KEPT),
        "work": float(plan.work(rank).precondition),
        "weights": _flat(network.parameters()),
    }


def _planned(sent: Sent, kind: str) -> dict[str, float]:
    """What is sent in a step of this kind, by purpose."""
    due = {"stale": ("apply",), "update": ("apply", "update")}.get(
        kind, ("apply", "update", "refresh")
    )
    purposes = {"apply": "gradients", "update": "factors", "refresh": "inverses"}
    found = {purposes[clock]: float(getattr(sent, purposes[clock])) for clock in due}
    found["agreement"] = float(sum(getattr(sent.agreement, clock) for clock in due))
    return {name: size for name, size in found.items() if size}


def _flat(parameters: Any) -> list[float]:
    numbers: Sequence[float] = torch.cat([_row(p) for p in parameters]).tolist()
    return list(numbers)


def _row(parameter: Tensor) -> Tensor:
    return parameter.detach().flatten().double()
