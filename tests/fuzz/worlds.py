"""Random worlds: two or three ranks beside one process that has the batches of all of them."""

import copy
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from torch import nn

import natgrad
from distributed.world import World
from fuzz.expected import losses
from fuzz.networks import Network, networks
from natgrad import Distributed
from natgrad.comm import Alone, connect
from natgrad.geometry import Euclidean
from natgrad.placement import Route

STEPS, RATE = 3, 0.05
PER_WORLD = 25  # cases on the same ranks


@dataclass(frozen=True)
class WorldCase:
    """``sizes``: samples of each rank in each micro-batch; the last rank's are dropped where there
    are only two."""

    network: Network
    layout: str
    sizes: tuple[tuple[int, int, int], ...]
    placement: Any
    route: Any
    packed: bool
    bucket_bytes: int
    structure: Any
    inverse: Any
    every: tuple[Any, Any]
    clip: float | None
    total: bool
    power: float
    momentum: float

    def kfac(self, model: nn.Module, group: Any) -> tuple[natgrad.KFAC, torch.optim.Optimizer]:
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.5)
        placement = self.placement
        if placement is natgrad.Hybrid:
            placement = natgrad.Hybrid(1 / connect(group).size)
        made = natgrad.KFAC(
            model,
            optimizer,
            damping=0.1,
            kl_clip=self.clip,
            update_every=self.every[0],
            refresh_every=self.every[1],
            structure=self.structure,
            inverse=self.inverse,
            geometry=Euclidean(self.power),
            momentum=self.momentum,
            loss=(natgrad.SumLoss if self.total else natgrad.MeanLoss)(),
            distributed=Distributed(
                placement=placement,
                group=group,
                packed=self.packed,
                bucket_bytes=self.bucket_bytes,
                route=self.route,
                wire_dtype=torch.float64,
            ),
        )
        return made, optimizer


def simple(network: Network) -> Network:
    """What is not compared here: axes that only sizes tell, which differ between ranks and one
    process; reentrant checkpoints, which DDP refuses."""
    pieces = tuple(
        (*piece[:-1], "" if piece[-1] == "tokens_first" else piece[-1]) for piece in network.pieces
    )
    return replace(network, pieces=pieces, checkpointed=None)


def consistent(case: WorldCase) -> WorldCase:
    if case.layout != "plain":  # DDP and FSDP count every rank once
        case = replace(case, sizes=tuple((n[0],) * 3 for n in case.sizes), total=False)
    if case.layout == "fsdp":
        case = replace(case, network=replace(case.network, tied=False, frozen=()))
    if isinstance(case.inverse, natgrad.Cholesky):
        kept = not isinstance(case.structure, natgrad.EKFAC)
        case = replace(case, power=1.0, structure=case.structure if kept else None)
    return case


CASES = st.builds(
    WorldCase,
    networks().map(simple),
    st.sampled_from(["plain", "plain", "ddp", "fsdp"]),
    st.lists(st.tuples(*(st.integers(1, 3) for _ in range(3))), min_size=1, max_size=2).map(tuple),
    st.sampled_from(
        [
            None,
            natgrad.CommOpt(),
            natgrad.MemOpt(),
            natgrad.Hybrid,  # by the number of ranks
            natgrad.ReduceScatter(),
        ]
    ),
    st.sampled_from([None, Route.DIRECT, Route.BALANCED]),
    st.booleans(),
    st.sampled_from([200, 25 << 20]),
    st.sampled_from(
        [
            None,
            natgrad.Kronecker("reduce"),
            natgrad.EKFAC(),
            natgrad.UnitWise(),
            natgrad.Diagonal(),
            natgrad.Full(limit=10_000),
        ]
    ),
    st.sampled_from([natgrad.Eigen(), natgrad.Cholesky()]),
    st.sampled_from([(1, 1), (1, 2), (2, 2), ({"A": 2, "G": 1}, {"A": 2, "G": 1})]),
    st.sampled_from([None, 1e-3]),
    st.booleans(),
    st.sampled_from([1.0, 1.0, 0.5]),
    st.sampled_from([0.0, 0.0, 0.9]),
).map(consistent)


def drawn(turn: int, number: int) -> list[WorldCase]:
    found: list[WorldCase] = []

    @seed(turn)
    @settings(max_examples=number, database=None, deadline=None, phases=[Phase.generate])
    @given(CASES)
    def case(one: WorldCase) -> None:
        found.append(one)

    case()
    return found


def worst(case: WorldCase) -> float:
    """How far this rank's weights are from those of one process, which rank 0 is as well."""
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model = case.network.build()
    alone = copy.deepcopy(model)
    kfac, optimizer = case.kfac(wrapped := wrap(model, case.layout), None)
    for step in range(STEPS):
        optimizer.zero_grad()
        mine = sum(sizes[rank] for sizes in case.sizes)
        for i in range(len(case.sizes)):
            last = i == len(case.sizes) - 1
            if case.layout == "ddp":
                wrapped.require_backward_grad_sync = last
            if case.layout == "fsdp":
                wrapped.set_requires_gradient_sync(last)
            x = inputs(case, step, i, ranks)[rank]
            total = losses(wrapped(x), torch.arange(len(x))).sum()
            (total if case.total else total / mine).backward()
        kfac.step()
        optimizer.step()
    kfac.detach()
    found = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    if rank:
        return 0.0
    kfac, optimizer = case.kfac(alone, Alone())
    for step in range(STEPS):
        optimizer.zero_grad()
        samples = sum(sum(sizes[:ranks]) for sizes in case.sizes)
        for i in range(len(case.sizes)):
            x = torch.cat(inputs(case, step, i, ranks))
            total = losses(alone(x), torch.arange(len(x))).sum()
            (total if case.total else total / samples).backward()
        kfac.step()
        optimizer.step()
    pairs = zip(found, alone.parameters(), strict=True)
    return max(float((a - b).detach().norm() / (1e-3 + b.detach().norm())) for a, b in pairs)


def inputs(case: WorldCase, step: int, micro: int, ranks: int) -> list[torch.Tensor]:
    sizes = case.sizes[micro][:ranks]
    return [case.network.inputs(n, 100 * step + 10 * micro + r) for r, n in enumerate(sizes)]


def wrap(model: nn.Module, layout: str) -> nn.Module:
    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if layout == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    return model


def judge(world: World, ranks: int, cases: list[WorldCase]) -> None:
    found = world.each(worst, {repr(case): (case,) for case in cases}, ranks=ranks, timeout=600)
    bad = {name: errors for name, errors in found.items() if not max(errors) < 1e-7}
    assert not bad


def FUZZED(profile: Any, turn: int, count: Any) -> None:  # noqa: N802 (a function here)
    """Some more, on ranks of their own."""
    world = World(["ignore"])
    try:
        cases = drawn(turn, min(PER_WORLD, profile.max_examples))
        count(len(cases))
        judge(world, 2 + turn % 2, cases)
    finally:
        world.close()
