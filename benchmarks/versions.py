"""A training step of the MLP on several ranks, by kinds, with any version of natgrad.

    PYTHONPATH=one/src:one torchrun --nproc-per-node 2 benchmarks/versions.py
    PYTHONPATH=other/src:other torchrun --nproc-per-node 2 /path/to/the/first/benchmarks/versions.py

`benchmarks.distributed` changes from version to version, and what it trains on before it looks has
a share in what an eigendecomposition takes: of factors of few batches most eigenvalues are zero.
Here both versions see the same data for as many steps. Printed are the median and the least
milliseconds of the slowest rank, of forward, backward and all of the step.
"""

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

import natgrad
from benchmarks import networks

STEPS, FIRST, BATCH = 13, 4, 32  # steps, of which the first ones are not counted
NEVER = 10**6
KINDS = {"update": (1, NEVER), "both": (1, 1)}


def seconds(placement: Any, update_every: int, refresh_every: int) -> torch.Tensor:
    """Of the steps that count, on the slowest rank."""
    torch.manual_seed(0)
    model = DistributedDataParallel(networks.mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    # How the first versions were told.
    if hasattr(natgrad, "Distributed"):
        where: dict[str, Any] = {"distributed": natgrad.Distributed(placement)}
    else:
        where = {"placement": placement}
    kfac = natgrad.KFAC(
        model, optimizer, update_every=update_every, refresh_every=refresh_every, **where
    )
    found = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(BATCH, 784, generator=generator)
        y = torch.randint(10, (BATCH,), generator=generator)
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        kfac.step()
        optimizer.step()
        found.append(time.perf_counter() - start)
    slowest = torch.tensor(found[FIRST:])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for placement in (natgrad.MemOpt(), natgrad.Local(), natgrad.CommOpt()):
        for kind, intervals in KINDS.items():
            found = 1000 * seconds(placement, *intervals)
            if dist.get_rank() == 0:
                name = type(placement).__name__
                print(f"{name}, {kind}: {found.median():.0f} ms ({found.min():.0f})", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
