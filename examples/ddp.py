"""K-FAC under DistributedDataParallel: two lines more, accumulation, and a run that can go on.

torchrun --nproc-per-node=2 examples/ddp.py
"""

from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import natgrad
from ranks import PLACEMENTS, Digits, arguments, finish, say, start

MICRO = 2  # backward passes of a step


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], placement="auto")
    parser.add_argument("--checkpoint", type=Path, help="go on from this file, and write it")
    args = parser.parse_args()
    rank, ranks = start(needed=2)
    digits = Digits()

    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    distributed = natgrad.Distributed(PLACEMENTS[args.placement])
    kfac = natgrad.KFAC(model, optimizer, damping=0.1, distributed=distributed)

    first = 0
    if args.checkpoint and args.checkpoint.exists():
        state = torch.load(args.checkpoint, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        kfac.load_state_dict(state["kfac"])
        first = state["step"]
        say(f"going on at step {first}")

    for step in range(first, args.steps):
        optimizer.zero_grad()
        for micro in range(MICRO):
            images, labels = digits.batch(step, rank + ranks * micro, ranks * MICRO)
            # Gradients and curvature leave a rank only in the last of its passes.
            with nullcontext() if micro == MICRO - 1 else model.no_sync():
                loss = F.cross_entropy(model(images), labels) / MICRO
                loss.backward()
        kfac.step()
        optimizer.step()
        if step % 10 == 0:
            say(f"step {step}: loss {MICRO * loss.item():.4f} on rank 0")

    if args.checkpoint:
        # All ranks take part: each has the curvature of some layers.
        state = {
            "model": model.module.state_dict(),
            "optimizer": optimizer.state_dict(),
            "kfac": kfac.state_dict(),
            "step": args.steps,
        }
        if rank == 0:
            torch.save(state, args.checkpoint)
    say(kfac.plan, kfac.traffic(), digits.test_line(model.module.eval(), args.steps))
    finish()


if __name__ == "__main__":
    main()
