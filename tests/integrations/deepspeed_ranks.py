"""Trains under DeepSpeed and under DDP, to be run by torchrun; rank 0 prints how far the weights
are apart, for every stage in the arguments (``1`` or, with a network in bfloat16, ``1-bf16``), how
far K-FAC has moved them from plain SGD's, and what is said of engines that it cannot serve."""

import json
import os
import sys
import time
from contextlib import nullcontext

import deepspeed
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from natgrad import KFAC
from natgrad.errors import SettingError
from natgrad.integrations import deepspeed as integration

STEPS, MICRO, EACH = 6, 2, 4
SETTINGS = {"update_every": 2, "refresh_every": 2, "kl_clip": 1e-3}


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two learning rates, which the KL clip depends on, and a layer without K-FAC."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(5, 7), nn.PReLU(), nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3, bias=False)
    )
    first, *others = model.children()
    groups = [
        {"params": first.parameters(), "lr": 0.02},
        {"params": [p for module in others for p in module.parameters()], "lr": 0.1},
    ]
    return model, torch.optim.SGD(groups, momentum=0.9)


def batch(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    x = torch.randn(EACH, 5, generator=generator)
    return x, torch.randint(3, (EACH,), generator=generator)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()


def by_ddp(rank: int, preconditioned: bool = True) -> Tensor:
    model, optimizer = network()
    wrapped = nn.parallel.DistributedDataParallel(model)
    kfac = KFAC(wrapped, optimizer, **SETTINGS) if preconditioned else None
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(MICRO):
            x, y = batch(step, micro, rank)
            with nullcontext() if micro == MICRO - 1 else wrapped.no_sync():
                (F.cross_entropy(wrapped(x), y) / MICRO).backward()
        if kfac is not None:
            kfac.step()
        optimizer.step()
    return weights(model)


def made(stage: int, **others: object) -> tuple[nn.Module, nn.Module]:
    """A network, and a real engine around it."""
    model, optimizer = network()
    config = {
        "train_micro_batch_size_per_gpu": EACH,
        "gradient_accumulation_steps": MICRO,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        **others,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return model, engine


def refused(**options: object) -> str:
    """What is said of a real engine with these settings."""
    try:
        integration.KFAC(made(**options)[1])
    except SettingError as error:
        return str(error)
    return ""


def by_deepspeed(rank: int, stage: int, *, half: bool = False) -> Tensor:
    model, engine = made(stage, **({"bf16": {"enabled": True}} if half else {}))
    kfac = integration.KFAC(engine, **SETTINGS)
    assert not kfac.gradients.are_local, "DeepSpeed averages gradients itself"
    for step in range(STEPS):
        for micro in range(MICRO):
            x, y = batch(step, micro, rank)
            x = x.bfloat16() if half else x
            engine.backward(F.cross_entropy(engine(x).float(), y))
            kfac.step()
            engine.step()
    assert kfac.steps == STEPS, "micro-batches are no steps"
    return weights(model).float()


def main() -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    deepspeed.init_distributed("gloo")
    expected = by_ddp(rank)
    found = {"plain": float((by_ddp(rank, preconditioned=False) - expected).abs().max())}
    for name in sys.argv[1:]:
        stage, _, kind = name.partition("-")
        end = by_deepspeed(rank, int(stage), half=kind == "bf16")
        found[name] = float((end - expected).abs().max())
    said = {"stage 3": refused(stage=3)}
    if rank == 0:
        print("distances", json.dumps(found), flush=True)
        print("refused", json.dumps(said), flush=True)
    torch.distributed.barrier()  # see finish() of examples/ranks.py
    time.sleep(0.1)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
