"""What the examples on several processes share: how they start, real digits, and a last report."""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import natgrad

PLACEMENTS = {
    "auto": natgrad.Auto(),
    "comm": natgrad.CommOpt(),
    "hybrid": natgrad.Hybrid(0.5),
    "mem": natgrad.MemOpt(),
}
BATCH = 128  # digits of all ranks in a step


def arguments(about: str, placement: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--steps", type=int, default=60, help="training steps (default 60)")
    parser.add_argument(
        "--placement", choices=PLACEMENTS, default=placement, help=f"default {placement}"
    )
    return parser


def start(needed: int) -> tuple[int, int]:
    """Join the processes that torchrun started. Returns this one's rank, and how many there are."""
    ranks = int(os.environ.get("WORLD_SIZE", 0))
    if not ranks or ranks % needed:
        found = f"is one of {ranks}" if ranks else "was not started by torchrun"
        sys.exit(
            f"{Path(sys.argv[0]).name} needs {needed} processes, or a multiple of that, but "
            f"{found}: run torchrun --nproc-per-node={needed} {sys.argv[0]}"
        )
    torch.set_num_threads(1)  # processes that share a machine share its cores
    torch.manual_seed(0)  # the same initial weights on all of them
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


class Digits:
    """1,437 real digits of 8 x 8 pixels to train on, and 360 to test on."""

    def __init__(self) -> None:
        data = load_digits()
        images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.tensor(data.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        self.train = images[order[:1437]], labels[order[:1437]]
        self.test = images[order[1437:]], labels[order[1437:]]

    def batch(self, step: int, part: int, parts: int) -> tuple[Tensor, Tensor]:
        """One of ``parts`` equal shares of a step's batch, the same one whenever asked for."""
        images, labels = self.train
        rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(step))
        mine = rows[:BATCH][part::parts]
        return images[mine], labels[mine]

    @torch.no_grad()
    def test_line(self, model: nn.Module, step: int) -> str:
        """All ranks must ask: a sharded model is gathered for it."""
        images, labels = self.test
        output = model(images)
        right = (output.argmax(1) == labels).float().mean()
        return f"step {step}: test loss {F.cross_entropy(output, labels):.4f}, accuracy {right:.1%}"


def say(*lines: object) -> None:
    """Print on one rank only."""
    if dist.get_rank() == 0:
        print(*lines, sep="\n\n", flush=True)


def finish() -> None:
    """Leave the processes, all at once, after gloo has let go of the last collective's tensors.

    Its threads need the interpreter for that; if it ends before, the process is aborted with
    "terminate called without an active exception". After the barrier all collectives are over, and
    sleeping lets those threads have their turn.
    """
    dist.barrier()
    time.sleep(0.1)
    dist.destroy_process_group()
