"""Small networks trained for a few steps, alone or on several ranks, in float64."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import natgrad
from kfac_keywords import grouped
from natgrad import KFAC
from natgrad.placement import Duty, Plan, World, assemble
from natgrad.specs import BlockSpec

STEPS = 3  # of which the first and the last update
EACH = 4  # samples of a rank in a step
LETTERS = 11


class CNN(nn.Module):
    """Convolutions with and without a stride, and normalisation by frozen statistics.

    No factor is singular: EKFAC's result would depend on how a null space is spanned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(2, 4, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(2, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.conv1(x)).tanh()
        x = self.norm2(self.conv2(x)).tanh()
        return self.head(x.mean((2, 3)))

    def train(self, mode: bool = True) -> "CNN":
        super().train(mode)
        self.norm1.eval()
        return self


class LM(nn.Module):
    """A transformer whose embedding is also its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(LETTERS, 8)
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.head = nn.Linear(8, LETTERS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(x).transpose(1, 2)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3, bias=False)
    )


NETWORKS = {"mlp": mlp, "cnn": CNN, "lm": LM}


def network(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = NETWORKS[name]().double().train()
        for key, buffer in model.named_buffers():
            if key.endswith(("running_mean", "running_var")):
                buffer.uniform_(0.5, 1.5)
    return model


def batch(name: str, step: int, samples: int) -> tuple[Tensor, Tensor]:
    """The same first samples, whatever their number."""
    with torch.random.fork_rng():
        torch.manual_seed(100 + step)
        if name == "lm":
            tokens = torch.randint(LETTERS, (16, 6))
            return tokens[:samples], tokens.roll(1, 1)[:samples]
        shape = (16, 5) if name == "mlp" else (16, 2, 6, 7)
        x, y = torch.randn(shape, dtype=torch.float64), torch.randint(3, (16,))
    return x[:samples], y[:samples]


@dataclass(frozen=True)
class Run:
    """What is trained and how. ``layout`` is "plain", "ddp", "fsdp" or "hsdp"."""

    network: str = "mlp"
    layout: str = "ddp"
    kfac: dict[str, Any] = field(default_factory=dict)
    micro: int = 1  # backward passes of a step
    steps: int = STEPS
    batches: tuple[int, ...] = ()  # samples of each rank, if not all the same
    reduction: str = "mean"

    def make(self, model: nn.Module) -> tuple[KFAC, torch.optim.Optimizer]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        settings = {"update_every": 2, "refresh_every": 2, "kl_clip": 1e-2, **self.kfac}
        terms = 6 if self.network == "lm" else 1
        settings = grouped(self.reduction, terms_per_sample=terms, **settings)
        kfac = KFAC(model, optimizer, **settings)
        return kfac, optimizer


def weights(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, whole."""
    return {
        name.removeprefix("module."): (p.full_tensor() if hasattr(p, "full_tensor") else p)
        .detach()
        .clone()
        for name, p in model.named_parameters()
    }


def alone(run: Run, ranks: int) -> dict[str, Tensor]:
    """One process with the batches of all ranks as one."""
    model = network(run.network)
    kfac, optimizer = run.make(model)
    samples = sum(run.batches) or EACH * ranks
    for step in range(run.steps):
        optimizer.zero_grad()
        x, y = batch(run.network, step, samples)
        F.cross_entropy(model(x), y, reduction=run.reduction).backward()
        kfac.step()
        optimizer.step()
    return weights(model)


def wrapped(model: nn.Module, layout: str) -> nn.Module:
    import torch.distributed as dist

    if layout == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if layout in ("fsdp", "hsdp"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        size = dist.get_world_size()
        shape = (size,) if layout == "fsdp" else (2, size // 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
        for child in model.children():  # attention returns a view, the others share a weight
            own = not isinstance(child, nn.Embedding | nn.MultiheadAttention | nn.Tanh)
            if own and child is not getattr(model, "head", None):
                fully_shard(child, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def backward(run: Run, model: nn.Module, step: int, rank: int, ranks: int) -> None:
    """This rank's share of a step, in ``run.micro`` passes of which only the last one syncs."""
    sizes = run.batches or (EACH,) * ranks
    x, y = batch(run.network, step, sum(sizes))
    first = sum(sizes[:rank])
    x, y = x[first : first + sizes[rank]], y[first : first + sizes[rank]]
    parts = list(zip(x.chunk(run.micro), y.chunk(run.micro), strict=True))
    for index, (one, target) in enumerate(parts):
        last = index == len(parts) - 1
        if run.layout in ("fsdp", "hsdp"):
            model.set_requires_gradient_sync(last)
        elif run.layout == "ddp":
            model.require_backward_grad_sync = last
        loss = F.cross_entropy(model(one), target, reduction=run.reduction)
        (loss / len(parts) if run.reduction == "mean" else loss).backward()


def train(run: Run) -> dict[str, Any]:
    """On the ranks of the default group."""
    import torch.distributed as dist

    # torch says so of every Linear on sequences.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = wrapped(network(run.network), run.layout)
    kfac, optimizer = run.make(model)
    sent = []
    for step in range(run.steps):
        optimizer.zero_grad()
        backward(run, model, step, rank, ranks)
        before = kfac.comm.traffic.snapshot()
        kfac.step()
        sent.append((kfac.comm.traffic - before).sent)
        optimizer.step()
    plan = kfac.plan
    others = sum(p.numel() for p in kfac.gradients.parameters) - sum(b.numel for b in plan.blocks)
    return {
        "weights": weights(model),
        "sent": sent,
        "predicted": plan.sent(rank, others),
        "memory": kfac.memory().total,
        "planned": plan.memory(rank),
        "rows": len(plan.rows),
        "sizes": {block.name: list(block.running) for block in kfac.blocks},
    }


@dataclass(frozen=True)
class AllTogether:
    """All ranks of a column decompose every factor together that can be shared out, whether that is
    faster or not. ``fraction`` as that of `Hybrid`."""

    fraction: float = 1.0

    def __call__(self, blocks: Sequence[BlockSpec], world: World) -> Plan:
        plan = natgrad.Hybrid(self.fraction)(blocks, world)
        duties = []
        for block in blocks:
            workers, apart = plan.workers[block.name], block.merged or block.in_basis
            decomposers = {
                name: workers[: block.factor(name).dim]
                if block.factor(name).can_be_split and not apart
                else workers[0]
                for name in block.decomposed
            }
            duties.append(Duty(workers, decomposers))
        return assemble(f"AllTogether({self.fraction})", blocks, world, duties)


METHODS = {
    "eigen": {"inverse": natgrad.Eigen()},
    "cholesky": {"inverse": natgrad.Cholesky()},
    "ekfac": {"structure": natgrad.EKFAC()},
}
